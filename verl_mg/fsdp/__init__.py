"""FSDP training backend: the module of `transformers`, its parameters sharded over ranks by torch's `fully_shard`."""
