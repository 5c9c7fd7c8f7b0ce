"""Statistics of the difference between the log-probs of trainer and rollout engine, over any split of the tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from verl_mg.algorithms import kl
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

LARGEST = 300.0  # nats beyond which a difference counts as this: the square of exp(300) is still a float64
DEPTHS = [2**power for power in range(10, 31)]
"""Ends of the ranges of positions over which differences are averaged apart, in tokens: 1k, 2k, 4k and so on."""


def statistics(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, positions: Tensor) -> dict[str, float]:
    """Returns sums, and maxima under "max_…", that `merge` and `summarize` need of some tokens; {} for an empty mask.

    Args:
        old_logprobs, rollout_logprobs: (tokens,) nats, of the trainer and of the engine that sampled.
        mask: (tokens,) bool, true on scored tokens.
        positions: (tokens,) int64, from 0 in the whole context, prompt included.
    """
    if not mask.any():
        return {}
    old, rollout = old_logprobs[mask].detach().double(), rollout_logprobs[mask].detach().double()
    difference = (old - rollout).clamp(-LARGEST, LARGEST)
    ratio, p, q = difference.exp(), old.exp(), rollout.exp()
    sums = {"abs": difference.abs()} | {name: kl.ESTIMATORS[name](-difference) for name in ("k1", "k3")}
    sums |= {"ratio": ratio, "ratio_squared": ratio.square(), "old": old, "rollout": rollout}
    sums |= {"p": p, "q": q, "pp": p.square(), "qq": q.square(), "pq": p * q}
    maxima = {"max_abs": difference.abs(), "max_ratio": ratio}
    depths = torch.bucketize(positions[mask], torch.tensor(DEPTHS, device=mask.device), right=True)
    by_depth = {depth: sums["abs"][depths == depth] for depth in depths.unique().tolist()}
    return {
        "tokens": float(len(old)),
        **{name: float(values.sum()) for name, values in sums.items()},
        **{f"tokens/{depth}": float(len(values)) for depth, values in by_depth.items()},
        **{f"abs/{depth}": float(values.sum()) for depth, values in by_depth.items()},
        **{name: float(values.max()) for name, values in maxima.items()},
    }


def merge(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the statistics of all tokens from statistics of parts, in any grouping; {} changes nothing."""
    whole: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in whole:
                whole[name] = value
            elif name.startswith("max_"):
                whole[name] = max(whole[name], value)
            else:
                whole[name] += value
    return whole


def summarize(whole: Mapping[str, float]) -> dict[str, float]:
    """Returns means, divergences and correlations; nothing where there was no token.

    With d = old - rollout and r = exp(d), over all tokens:

    `mean_abs`, `max_abs` of |d|; `mean_ratio`, `max_ratio` of r; `k1`, `k3`, estimates of KL(rollout || trainer) in
    nats (see `kl.penalty`); `rollout_perplexity`, `trainer_perplexity`, exp of the mean negative log-prob;
    `effective_samples`, (sum r)^2 / (n sum r^2), the share of the n tokens that would give the same variance had the
    trainer sampled them (Kish 1965); `correlation`, Pearson's, of the probabilities exp(old) and exp(rollout), absent
    where one of them is the same for all tokens; `by_depth/1k-2k` and others, the mean of |d| over tokens at positions
    of 1,024 to 2,047, for each range with tokens.
    """
    if not whole:
        return {}
    n = whole["tokens"]
    summary = {
        "mean_abs": whole["abs"] / n,
        "max_abs": whole["max_abs"],
        "mean_ratio": whole["ratio"] / n,
        "max_ratio": whole["max_ratio"],
        "k1": whole["k1"] / n,
        "k3": whole["k3"] / n,
        "rollout_perplexity": math.exp(min(-whole["rollout"] / n, LARGEST)),
        "trainer_perplexity": math.exp(min(-whole["old"] / n, LARGEST)),
        "effective_samples": whole["ratio"] ** 2 / (n * whole["ratio_squared"]),
    }
    variances = [whole[xx] / n - (whole[x] / n) ** 2 for x, xx in (("p", "pp"), ("q", "qq"))]
    # Below that a variance is the rounding of the two numbers it is the difference of.
    if all(variance > 1e-12 * whole[xx] / n for variance, xx in zip(variances, ("pp", "qq"), strict=True)):
        covariance = whole["pq"] / n - whole["p"] * whole["q"] / n**2
        summary["correlation"] = covariance / math.sqrt(variances[0] * variances[1])
    depths = sorted(int(name.removeprefix("tokens/")) for name in whole if name.startswith("tokens/"))
    return summary | {
        f"by_depth/{_range_of(depth)}": whole[f"abs/{depth}"] / whole[f"tokens/{depth}"] for depth in depths
    }


def _range_of(depth: int) -> str:
    """Returns the positions of the number of a range: 0-1k, 1k-2k, ..., 512k-1024k, 1024k-2048k."""
    first, end = (0, *DEPTHS)[depth], (*DEPTHS, 2 * DEPTHS[-1])[depth]
    return f"{first // 1024}{'k' if first else ''}-{end // 1024}k"
