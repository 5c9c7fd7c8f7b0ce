"""Dr. GRPO: GRPO done right (arXiv:2503.20783).

GRPO without its two biases: no division by the group's deviation, which favours questions that are too easy or too
hard, and none by the length of a response, which favours long wrong ones. Every token weighs the same constant.
"""

from typing import Literal

from recipes import grpo
from recipes.grpo import iteration, roles

__all__ = ["Config", "iteration", "roles"]


class Config(grpo.Config):
    normalize_std: bool = False
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "seq-mean-token-sum-norm"
