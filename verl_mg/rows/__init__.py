"""Rows of a batch: made of samples, numbered over all ranks, and moved between ranks."""
