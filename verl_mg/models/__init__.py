"""What a model consists of: its configuration, its Hugging Face tensors, its FLOPs."""
