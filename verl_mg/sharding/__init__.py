"""Which box of which Hugging Face tensor each parameter shard contains, for each runtime."""
