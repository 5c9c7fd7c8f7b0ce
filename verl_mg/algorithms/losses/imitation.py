"""Losses that raise the likelihood of given tokens."""

import torch
from torch import Tensor

from verl_mg.algorithms.losses.columns import Metrics, masked, masked_constant


def sft_loss(logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
    """Returns the negative log-likelihood of each token, and no metrics.

    Args:
        logprobs: (tokens,) nats.
        mask: (tokens,) bool.

    Returns:
        (tokens,) nats, 0 outside the mask, and no metrics.
    """
    return torch.where(mask, -logprobs, 0.0), {}


def imitation_loss(logprobs: Tensor, weights: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
    """Returns the weighted negative log-likelihood of each token.

    With weight 1 on the tokens of right responses and 0 on others: the language-model loss on positive examples of
    VAPO (arXiv:2504.05118), which is added to the policy loss with a factor of 0.1. Its mean is over all tokens if
    aggregated by "token-mean"; weights of all tokens over tokens of right responses, both counted over all ranks, make
    it the mean over the latter, as in the paper.

    Args:
        logprobs: (tokens,) nats.
        weights: (tokens,), constants.
        mask: (tokens,) bool.

    Returns:
        (tokens,) nats, and the metric `imitated`, 1 where the weight is not 0.
    """
    weights = masked_constant(mask, weights)
    return -weights * masked(mask, logprobs), {"imitated": (weights != 0).to(logprobs.dtype)}
