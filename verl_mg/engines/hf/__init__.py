"""Rollout engine on a `transformers` model inside the process of the rank."""

from verl_mg.engines.hf.engine import HFEngine

__all__ = ["HFEngine"]
