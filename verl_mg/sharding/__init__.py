"""Boxes of the Hugging Face tensors that each parameter shard contains, for each runtime."""
