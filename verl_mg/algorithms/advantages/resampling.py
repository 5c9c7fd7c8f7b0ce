"""PF-PPO: training on the responses whose scores are the most reliable (arXiv:2409.06957).

The scores of a reward model are least noisy where they are high or low, so the batch is resampled by weight:

    kind          weight of a response
    "pow"         |score| ^ power
    "max_min"     1 for the highest and the lowest score, 0 for others
    "max_random"  0.4 for the highest score, 0.1 for others
"""

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from verl_mg.errors import UserError

MIN_WEIGHT = 1e-8  # a batch of zero weights is drawn from uniformly


def _max_min(scores: Tensor, power: float) -> Tensor:
    return ((scores == scores.max()) | (scores == scores.min())).double()


def _max_random(scores: Tensor, power: float) -> Tensor:
    return torch.full_like(scores, 0.1, dtype=torch.float64).masked_fill(scores == scores.max(), 0.4)


KINDS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "pow": lambda scores, power: scores.double().abs().pow(power),
    "max_min": _max_min,
    "max_random": _max_random,
}


def resampling_weights(scores: Tensor, kind: str, power: float = 2.0) -> Tensor:
    """Returns the relative frequency with which each response is drawn.

    Args:
        scores: (n,) float, of all responses to draw from.
        kind: one of "pow", "max_min", "max_random"; UserError for any other.
        power: of "pow", 0 or more; else unused.

    Returns:
        (n,) float64, above 0.
    """
    if kind not in KINDS:
        raise UserError(f"resampling {kind!r} is unknown. Write one of {', '.join(KINDS)}")
    if not power >= 0:
        raise UserError(f"resampling power is {power}. Write 0 or more, as in 2.0")
    return KINDS[kind](scores, power) + MIN_WEIGHT if len(scores) else scores.double()


def select(scores: Tensor, count: int, kind: str, power: float, generator: Generator) -> Tensor:
    """Returns responses to train on, drawn with replacement by `resampling_weights`.

    Args:
        scores: (n,) float; the draw is over all n, so give those of one prompt to stay within it.
        count: how many to draw, 0 or more.
        kind, power: arguments of `resampling_weights`.
        generator: the same state draws the same rows; on the device of `scores`.

    Returns:
        (count,) int64 row indices, sorted: copies of a row are adjacent.
    """
    if count < 0 or (count and not len(scores)):
        raise UserError(f"{count} responses cannot be drawn from {len(scores)}. Sample at least one response")
    weights = resampling_weights(scores, kind, power)
    if not count:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    return torch.multinomial(weights, count, replacement=True, generator=generator).sort().values
