"""Sharding tables: which box of which Hugging Face tensor each parameter shard holds, per runtime."""
