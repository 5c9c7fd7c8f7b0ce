"""Model weights on disk: Hugging Face safetensors, sharded safetensors, PEFT adapters."""
