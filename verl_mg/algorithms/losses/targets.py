"""Losses with given targets: tokens to imitate, and the returns that the critic predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from verl_mg.algorithms.losses.policy import Metrics, check_positive, masked, masked_constant
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")


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


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Metrics]:
    """Returns (tokens,) half the squared error, or the larger of it and the clipped one (OpenAI baselines, ppo2).

    max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2. Metrics: `value_clip_fraction` (1 where the clip
    removes the gradient); and for `explained_variance` `value`, `return`, `return_squared`, `value_error`
    (R - V), `value_error_squared`.

    Args:
        values, old_values: (tokens,) V of the critic in training, which has the only gradient, and V_old before.
        returns, mask: (tokens,) targets R of the values, and bool, true on tokens that count.
        clip: largest distance of V from V_old that has a gradient, above 0; None does not clip.
    """
    values, returns = masked(mask, values), masked_constant(mask, returns)
    error = returns - values
    loss, cut = error.square(), torch.zeros_like(mask)
    if clip is not None:
        check_positive("clip", clip, "0.5")
        old_values = masked_constant(mask, old_values)
        clipped = (torch.minimum(torch.maximum(values, old_values - clip), old_values + clip) - returns).square()
        loss, cut = torch.maximum(loss, clipped), clipped.detach() > loss.detach()
    left = error.detach()
    return 0.5 * loss, {
        "value_clip_fraction": cut.to(loss.dtype),
        "value": values.detach(),
        "return": returns,
        "return_squared": returns.square(),
        "value_error": left,
        "value_error_squared": left.square(),
    }


def explained_variance(means: Mapping[str, float], prefix: str = "") -> float:
    """Returns 1 - Var(R - V) / Var(R); NaN where all returns are equal.

    1: the critic predicts the returns exactly; 0: no better than a constant; below 0: worse.

    Args:
        means: means over all tokens of the metrics of `value_loss`.
        prefix: text before the names of these metrics, as in "critic/".
    """
    squared = means[f"{prefix}return_squared"]
    variance = squared - means[f"{prefix}return"] ** 2
    unexplained = means[f"{prefix}value_error_squared"] - means[f"{prefix}value_error"] ** 2
    # A smaller variance is only the rounding of the two float32 means it is the difference of.
    return 1 - unexplained / variance if variance > 1e-6 * squared else float("nan")
