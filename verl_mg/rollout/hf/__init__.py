"""The engine without a service: a `transformers` model in the process of the rank, and how it decodes."""

from verl_mg.rollout.hf.engine import HFEngine

__all__ = ["HFEngine"]
