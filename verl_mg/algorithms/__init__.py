"""Advantages, losses, KL penalties and loss aggregation: pure functions of tensors."""
