"""Scores of k tries at a problem, estimated from n tries: pass@k, avg@k, maj@k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")


def pass_at_k(correct: Tensor, k: int) -> Tensor:
    """Returns (problems,) float64 probability that one of k tries is right: arXiv:2107.03374, equation 1.

    1 - C(n - c, k) / C(n, k), the unbiased estimate from c right ones of n tries, exact until its last rounding.

    Args:
        correct: (problems, n) bool.
        k: from 1 to n.
    """
    n = correct.shape[1]
    _check_tries(k, n)
    # Integers: binomials of many tries have more digits than a float.
    ways = math.comb(n, k)
    chances = [(ways - math.comb(n - right, k)) / ways for right in correct.sum(1).tolist()]
    return torch.tensor(chances, dtype=torch.float64)


def avg_at_k(rewards: Tensor, k: int) -> Tensor:
    """Returns (problems,) float64 expected mean reward of k tries, which is the mean of all n tries whatever k is.

    Args:
        rewards: (problems, n) float.
        k: from 1 to n.
    """
    _check_tries(k, rewards.shape[1])
    return rewards.double().mean(1)


def maj_at_k(answers: Sequence[Sequence[str | None]], rewards: Tensor, k: int) -> Tensor:
    """Returns (problems,) float64 reward of the answer that most of k tries give: self-consistency, arXiv:2203.11171.

    Averaged over n // k blocks of k tries, in their order; fewer than k at the end are not used. The winner's reward is
    that of its first try. Of answers with equally many votes the first one wins.

    Args:
        answers: for each problem n strings, compared as such; None has no vote, and a block without votes scores 0.
        rewards: (problems, n) float, of each try.
        k: from 1 to n.
    """
    n = rewards.shape[1]
    _check_tries(k, n)
    if [len(tries) for tries in answers] != [n] * len(rewards):
        raise UserError(f"majority vote: answers are not {len(rewards)} lists of {n}. Pass an answer for every reward")
    scores = [
        [_majority(tries[start : start + k], row[start : start + k]) for start in range(0, n - k + 1, k)]
        for tries, row in zip(answers, rewards.tolist(), strict=True)
    ]
    return torch.tensor(scores, dtype=torch.float64).reshape(len(rewards), n // k).mean(1)


def _majority(answers: Sequence[str | None], rewards: Sequence[float]) -> float:
    # Counter keeps the order of first occurrence, and max takes the first of equals.
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    return rewards[list(answers).index(max(votes, key=votes.__getitem__))]


def _check_tries(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise UserError(f"k is {k}, but each problem has {n} tries. Write 1 to {n}")
