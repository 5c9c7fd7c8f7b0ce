"""The engine without a service: a `transformers` model in the process of the rank, and how it decodes."""

from verl_mg.rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
