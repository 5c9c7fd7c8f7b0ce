"""PF-PPO: train on the responses whose score a reward model can be trusted with (arXiv:2409.06957).

Its rewards are least noisy where they are high or low, so the batch is drawn anew, with replacement, by weight:

    kind          weight of a response
    "pow"         |score| ^ power
    "max_min"     1 for the highest and the lowest score, 0 for others
    "max_random"  0.4 for the highest score, 0.1 for others
"""

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from verl_mg.errors import UserError

WEIGHT_FLOOR = 1e-8  # lets a batch of zero weights be drawn from, evenly


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
    """How often each response is drawn, up to a common factor.

    Args:
        scores: (n,) float, of all responses that are drawn from.
        kind: one of "pow", "max_min", "max_random"; UserError for any other.
        power: of "pow", 0 or more; else unused.

    Returns:
        (n,) float64, above 0.
    """
    if kind not in KINDS:
        raise UserError(f"resampling {kind!r} is unknown; write one of {', '.join(KINDS)}")
    if not power >= 0:
        raise UserError(f"resampling power is {power}; write 0 or more, as in 2.0")
    return KINDS[kind](scores, power) + WEIGHT_FLOOR if len(scores) else scores.double()


def select(scores: Tensor, count: int, kind: str, power: float, generator: Generator) -> Tensor:
    """The responses to train on, drawn with replacement by `resampling_weights`.

    Args:
        scores: (n,) float; the draw is over all n, so give those of one prompt to stay within it.
        count: how many to draw, 0 or more.
        kind, power: as in `resampling_weights`.
        generator: the same state draws the same rows; on the device of `scores`.

    Returns:
        (count,) int64 row indices, sorted: copies of a row stand side by side.
    """
    if count < 0 or (count and not len(scores)):
        raise UserError(f"{count} responses cannot be drawn from {len(scores)}")
    weights = resampling_weights(scores, kind, power)
    if not count:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    return torch.multinomial(weights, count, replacement=True, generator=generator).sort().values
