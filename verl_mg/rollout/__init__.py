"""Generation: the engine interface and the engines behind it."""

from verl_mg.rollout.engine import Request, RolloutEngine, Sample, Sampling

__all__ = ["Request", "RolloutEngine", "Sample", "Sampling"]
