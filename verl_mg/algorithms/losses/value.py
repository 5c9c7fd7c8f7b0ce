"""The critic's loss, and how much of the returns it explains."""

from collections.abc import Mapping

import torch
from torch import Tensor

from verl_mg.algorithms.losses.columns import Metrics, check_positive, constant, inside


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Metrics]:
    """Half the squared error, or the larger of that and of the one that a clip leaves (Schulman et al., baselines).

    max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2.

    Args:
        values: (tokens,) of the critic in training, V; the gradient flows through these alone.
        old_values: (tokens,) of the critic at the start of the iteration, V_old.
        returns: (tokens,) what the values are to be, R.
        mask: (tokens,) bool, true on tokens that count.
        clip: how far V may move from V_old before its gradient is cut, above 0; None does not clip.

    Returns:
        (tokens,) loss, and the metrics `value_clip_fraction` (1 where the clip cuts the gradient) and, for
        `explained_variance`, `value`, `return`, `return_squared`, `value_error` (R - V), `value_error_squared`.
    """
    values, returns = inside(mask, values), constant(mask, returns)
    error = returns - values
    loss, cut = error.square(), torch.zeros_like(mask)
    if clip is not None:
        check_positive("clip", clip, "0.5")
        old_values = constant(mask, old_values)
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


def explained_variance(means: Mapping[str, float]) -> float:
    """1 - Var(R - V) / Var(R) from the means of the metrics of `value_loss`; NaN where all returns are equal.

    1: the critic knows the returns; 0: no better than a constant; below: worse.
    """
    expand_to_tokens = means["return_squared"] - means["return"] ** 2
    left = means["value_error_squared"] - means["value_error"] ** 2
    # Below that the spread is the rounding of the two float32 means it is the difference of.
    return 1 - left / expand_to_tokens if expand_to_tokens > 1e-6 * means["return_squared"] else float("nan")
