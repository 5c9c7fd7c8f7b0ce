"""Losses that raise the likelihood of given tokens."""

import torch
from torch import Tensor

from verl_mg.algorithms.losses.columns import Metrics, masked, masked_constant


def sft_loss(logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
    """Returns (tokens,) negative log-likelihoods in nats, and no metrics.

    Args:
        logprobs, mask: (tokens,) nats and bool.
    """
    return torch.where(mask, -logprobs, 0.0), {}


def imitation_loss(logprobs: Tensor, weights: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
    """Returns (tokens,) weighted negative log-likelihoods, and the metric `imitated`, 1 where the weight is not 0.

    With weight 1 on the tokens of right responses and 0 on others: the language-model loss on positive examples of
    VAPO (arXiv:2504.05118), which is added to the policy loss with a factor of 0.1. "token-mean" is its mean over
    all tokens; for the paper's mean over tokens of right responses, weight these by all tokens over tokens of right
    responses, both counted over all ranks.

    Args:
        logprobs, weights, mask: (tokens,) nats, constants and bool.
    """
    weights = masked_constant(mask, weights)
    return -weights * masked(mask, logprobs), {"imitated": (weights != 0).to(logprobs.dtype)}
