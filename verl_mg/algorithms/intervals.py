"""Confidence intervals of means over the prompts of an evaluation, and paired tests of two evaluations.

Prompts are independent draws from a larger set of problems, the samples of a prompt are not independent. So a score is
first estimated for each prompt, from all of its samples, and the spread of these estimates gives the standard error of
their mean: it is clustered by prompt and includes the noise of the samples, arXiv:2411.00640, sections 2.1 and 2.2.
Differences of two models are taken prompt by prompt, section 4.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

CONFIDENCE = 0.95  # probability with which an interval contains the expectation over all prompts of the kind
ENUMERATED = 14  # differences that are not 0 up to which a permutation test takes all assignments of signs
DRAWS = 10_000  # assignments of signs that a permutation test draws otherwise
ROUNDING = 1e-9  # relative difference up to which sums are equal that differ by the order of their terms
BISECTIONS = 48  # halvings of a quantile's bracket, whose width is at most the quantile
_BLOCK = 500


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its confidence interval."""

    value: float
    standard_error: float | None  # None for a single prompt
    low: float | None  # end of the interval; None for a single prompt
    high: float | None  # end of the interval; None for a single prompt


def mean_interval(scores: Tensor, bounded: bool = False) -> Estimate:
    """Returns the mean over prompts with the interval of Student's t: mean +- t(n - 1) * deviation / sqrt(n).

    Where all prompts score the same, their spread says nothing. If scores are `bounded` and all 0, the upper end is
    1 - alpha**(1 / n): n prompts score 0 with a probability of at most (1 - mean)**n. Likewise if all are 1.

    Args:
        scores: (prompts,) float, the mean of all samples of each prompt.
        bounded: whether scores are between 0 and 1.
    """
    n, values = len(scores), scores.double()
    mean = float(values.mean())
    if n < 2:
        return Estimate(mean, None, None, None)
    error = float(values.std(correction=1)) / math.sqrt(n)
    if bounded and bool((values == values[0]).all()) and mean in (0.0, 1.0):
        edge = 1 - (1 - CONFIDENCE) ** (1 / n)
        return Estimate(mean, error, *((0.0, edge) if mean == 0 else (1 - edge, 1.0)))
    half = student_quantile((1 + CONFIDENCE) / 2, n - 1) * error
    low, high = mean - half, mean + half
    return Estimate(mean, error, *((max(low, 0.0), min(high, 1.0)) if bounded else (low, high)))


def paired_p_value(differences: Tensor, seed: int = 0) -> float:
    """Returns the two-sided p-value of a paired permutation test of the mean difference (Fisher 1935, section 21).

    If both models are equally good, the difference of a prompt has either sign with the same probability: p is the
    share of assignments of signs whose sum is at least as large as the observed one. For scores of 0 and 1 it is the
    exact test of McNemar. With more than `ENUMERATED` differences, signs are drawn, and the observed ones count as a
    draw (Phipson and Smyth 2010, doi:10.2202/1544-6115.1585), so that p is at least 1 / (DRAWS + 1).

    Args:
        differences: (prompts,) float, scores of one model minus scores of the other.
        seed: seed of the drawn signs.
    """
    values = differences.double()
    values = values[values != 0]
    n = len(values)
    if n == 0:
        return 1.0
    observed = float(values.sum().abs()) - ROUNDING * float(values.abs().sum())
    if n <= ENUMERATED:
        signs = 1 - 2 * (torch.arange(2**n).unsqueeze(1) >> torch.arange(n) & 1).double()
        return float(((signs @ values).abs() >= observed).double().mean())
    generator = torch.Generator().manual_seed(seed)
    reached = 0
    for _ in range(0, DRAWS, _BLOCK):  # bounds the memory
        signs = 1 - 2 * torch.randint(2, (_BLOCK, n), generator=generator).double()
        reached += int(((signs @ values).abs() >= observed).sum())
    return (reached + 1) / (DRAWS + 1)


def student_quantile(probability: float, degrees: int) -> float:
    """Returns the quantile of Student's t distribution, by bisection of its distribution function.

    Args:
        probability, degrees: above 0.5 and below 1; degrees of freedom, at least 1.
    """
    low, high = 0.0, 1.0
    while _student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _student_cdf(t: float, degrees: int) -> float:
    """Returns P(T <= t) for t >= 0: Abramowitz and Stegun 1964, formulas 26.7.3 and 26.7.4, finite sums."""
    theta = math.atan(t / math.sqrt(degrees))
    cosine, odd = math.cos(theta), degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for i in range(1 + odd, degrees, 2):
        total += term
        term *= cosine * cosine * i / (i + 1)
    both = 2 / math.pi * (theta + math.sin(theta) * total) if odd else math.sin(theta) * total
    return (1 + both) / 2
