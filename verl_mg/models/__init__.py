"""What a model consists of: config.json, tensors by name and shape, FLOPs."""
