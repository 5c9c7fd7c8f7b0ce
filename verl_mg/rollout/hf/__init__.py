"""Rollout engine on a `transformers` model inside the process of the rank."""

from verl_mg.rollout.hf.engine import HFEngine

__all__ = ["HFEngine"]
