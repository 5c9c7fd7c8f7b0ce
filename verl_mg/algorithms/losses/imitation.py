"""Losses that raise the likelihood of given tokens."""

import torch
from torch import Tensor

from verl_mg.algorithms.losses.columns import Metrics, constant, inside


def sft_loss(logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood: (tokens,) nats from `logprobs` (tokens,) nats and `mask` (tokens,) bool."""
    return torch.where(mask, -logprobs, 0.0), {}


def imitation_loss(logprobs: Tensor, weights: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the tokens, each as heavy as its weight.

    With weight 1 on the tokens of right responses and 0 on others: the language-model loss on positive examples of
    VAPO (arXiv:2504.05118), which is added to the policy loss with a factor of 0.1. Its mean is over all tokens if
    aggregated as it stands; weights of all tokens over tokens of right responses, both counted over all ranks, make
    it the mean over the latter, as in the paper.

    Args:
        logprobs: (tokens,) nats.
        weights: (tokens,), constants.
        mask: (tokens,) bool.

    Returns:
        (tokens,) nats, and the metric `imitated`, 1 where the weight is not 0.
    """
    weights = constant(mask, weights)
    return -weights * inside(mask, logprobs), {"imitated": (weights != 0).to(logprobs.dtype)}
