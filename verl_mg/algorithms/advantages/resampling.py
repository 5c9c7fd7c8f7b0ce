"""PF-PPO: training on the responses whose scores are the most reliable (arXiv:2409.06957).

The scores of a reward model are least noisy where they are high or low, so responses are drawn by weight:

    kind           weight of a response
    "best_random"  p for the best of its N to a prompt, (1 - p) / (N - 1) for each other one    section 4, p = 1/2
    "best_worst"   p for the best of its prompt, 1 - p for the worst, 0 for others              section 4, p = 1/2
    "pow"          |score| ^ power                                                              section 5.6
    "max_min"      1 for the highest and the lowest score of all, 0 for others
    "max_random"   0.4 for the highest score of all, 0.1 for others

The first two are ranks within a prompt, whose weights add up to 1; p = 1 is the paper's best-of-N. The last two, and
"pow", ignore prompts, as in verl.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from verl_mg.algorithms.aggregation import segment_sums
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

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
RANKED = ("best_random", "best_worst")  # weights by rank within a prompt


def resampling_weights(
    scores: Tensor, groups: Tensor, kind: str, power: float = 2.0, filter_probability: float = 0.5
) -> Tensor:
    """Returns (n,) float64 relative frequencies, above 0, with which responses are drawn.

    Args:
        scores: (n,) float, of all responses to draw from.
        groups: (n,) int64, equal for responses to one prompt.
        kind: a kind of the table above; UserError for any other.
        power: exponent of "pow", 0 or more.
        filter_probability: p of the ranked kinds, from 0 to 1.
    """
    if kind not in (*RANKED, *KINDS):
        raise UserError(f"resampling {kind!r} is unknown. Write one of {', '.join((*RANKED, *KINDS))}")
    if not power >= 0:
        raise UserError(f"resampling power is {power}. Write 0 or more, as in 2.0")
    if not 0 <= filter_probability <= 1:
        raise UserError(f"filter_probability is {filter_probability}. Write a number from 0 to 1")
    if not len(scores):
        return scores.double()
    weights = KINDS[kind](scores, power) if kind in KINDS else _by_rank(scores, groups, kind, filter_probability)
    return weights + MIN_WEIGHT


def _by_rank(scores: Tensor, groups: Tensor, kind: str, best: float) -> Tensor:
    order = torch.argsort(scores, descending=True, stable=True)
    order = order[torch.argsort(groups[order], stable=True)]
    _, counts = groups[order].unique_consecutive(return_counts=True)
    size = counts.repeat_interleave(counts)
    rank = torch.arange(len(scores), device=scores.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    others = (1 - best) / (size - 1).clamp(min=1).double()
    if kind == "best_worst":
        others = torch.where(rank == size - 1, 1 - best, 0.0).double()
    weights = torch.where(rank == 0, best, others).masked_fill(size == 1, 1.0)
    # Equal scores of a prompt share their weights, so that the order of rows does not decide.
    keys = torch.stack([groups[order].double(), scores[order].double()])
    _, tie, tied = keys.unique_consecutive(dim=1, return_inverse=True, return_counts=True)
    shared = (segment_sums(weights, tied) / tied)[tie]
    return torch.empty_like(shared).index_copy_(0, order, shared)


def select(weights: Tensor, count: int, seed: int) -> Tensor:
    """Returns (count,) int64 row indices drawn with replacement, sorted, so that copies of a row are adjacent.

    Args:
        weights: (n,) `resampling_weights`.
        count: how many to draw, 0 or more.
        seed: of the draw.
    """
    if count < 0 or (count and not len(weights)):
        raise UserError(f"{count} responses cannot be drawn from {len(weights)}. Sample at least one response")
    if not count:
        return torch.empty(0, dtype=torch.int64, device=weights.device)
    generator = torch.Generator(weights.device).manual_seed(seed)
    # One draw over all prompts: a prompt has its number of draws on average, as in the paper's table 4.
    return torch.multinomial(weights, count, replacement=True, generator=generator).sort().values
