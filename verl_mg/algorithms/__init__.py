"""Advantages, losses, KL penalties, loss aggregation and scores of k tries: pure functions of tensors."""
