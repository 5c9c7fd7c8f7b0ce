"""Generation: the engine interface and the engines behind it.

engine              requests in, samples out
embedded/  sglang/  the two engines
tools/              turns with tools, around either
dealing  shift      who works on which sample, and one rank's part of that
"""

from verl_mg.rollout.engine import Request, RolloutEngine, Sample, Sampling

__all__ = ["Request", "RolloutEngine", "Sample", "Sampling"]
