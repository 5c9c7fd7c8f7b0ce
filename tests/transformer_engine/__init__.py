"""Transformer Engine in tests on the CPU."""
