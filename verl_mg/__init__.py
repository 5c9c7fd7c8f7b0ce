"""Reinforcement learning of language models as one SPMD program over megatron-core."""

__version__ = "0.1.0"
