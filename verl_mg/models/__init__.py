"""Descriptions of a model: its configuration, its Hugging Face tensors, its FLOPs."""
