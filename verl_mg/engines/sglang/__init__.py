"""SGLang as a rollout engine: `sglang.Engine` in a separate process, or a server at an address.

arguments         a layout and a device as SGLang's server arguments and environment; what it does not compute
host              the main object of such an engine's process
requests          requests and responses in SGLang's own fields
shard_receiver    receives the shards of a server's rank, inside SGLang; folder_receiver: reads changes of them
weight_loader     copies the shards into an engine's parameters, inside SGLang
internals         everything that is used or replaced in SGLang and is not public, for one version of it
"""
