"""Advantages from the score of a sample and the scores of the other samples of its prompt.

Every sum runs in an order that only the values decide, so results are bitwise independent of the order of the rows
and of a device's atomics. Three rows of two samples of one prompt, the first in two segments (GRPO):

    scores        [1.0, 1.0, 0.0]
    groups        [7, 7, 7]            (n,) int64, equal for samples of one prompt
    trajectories  [3, 3, 4]            (n,) int64, equal for the rows of one sample
    advantages    [0.707, 0.707, -0.707]

Neither ids need be sorted or consecutive. A sample counts once, however many rows it has; its rows have the same
score and get the same advantage. All rows of a group must be here; a group of one sample has advantage 0. Scores are
(n,) float in any unit, sums are float64, and results have the dtype of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_mg.algorithms.aggregation import segment_sums
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

EPSILON = 1e-6  # avoids a division by 0 where the scores of a group are equal


def group_relative(scores: Tensor, groups: Tensor, trajectories: Tensor, normalize_by_std: bool = True) -> Tensor:
    """Returns (n,) score minus the mean score of the prompt, GRPO's advantage.

    Divided by the unbiased standard deviation of the group plus 1e-6: arXiv:2402.03300, section 4.1.2. Not divided:
    Dr. GRPO, arXiv:2503.20783, section 3.2, and, whitened over the batch, REINFORCE++ with baseline,
    arXiv:2501.03262.

    Args:
        scores, groups, trajectories: (n,), see the module.
        normalize_by_std: divides by the standard deviation of the group.
    """
    samples = _Samples(groups, trajectories, scores)
    advantages = samples.centered(scores)
    if normalize_by_std:
        # Of centred scores: squares of scores with a large offset would lose their spread to rounding.
        variance = segment_sums(advantages.square(), samples.counts) / (samples.counts - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + EPSILON)[samples.index]
    return samples.to_rows(advantages, scores.dtype)


def rloo(scores: Tensor, groups: Tensor, trajectories: Tensor) -> Tensor:
    """Returns (n,) score minus the mean score of the other samples of its prompt: RLOO, arXiv:2402.14740.

    Args:
        scores, groups, trajectories: (n,), see the module.
    """
    samples = _Samples(groups, trajectories, scores)
    factor = samples.counts.double() / (samples.counts - 1).clamp(min=1)  # a quotient of integers would be float32
    return samples.to_rows(samples.centered(scores) * factor[samples.index], scores.dtype)


def opo(scores: Tensor, lengths: Tensor, groups: Tensor, trajectories: Tensor) -> Tensor:
    """Returns (n,) score minus the optimal baseline sum(l r) / sum(l) of its prompt: OPO, arXiv:2505.23585.

    The baseline of least gradient variance where a response's squared gradient norm grows with its length l.

    Args:
        scores, groups, trajectories: (n,), see the module.
        lengths: (n,) tokens that the policy wrote in all rows of the sample; a sample of 0 does not count.
    """
    samples = _Samples(groups, trajectories, scores, lengths)
    score, weight = samples.sorted(scores).double(), samples.sorted(lengths).double()
    total = segment_sums(weight, samples.counts)
    baseline = segment_sums(weight * score, samples.counts) / total.clamp(min=1)
    advantages = torch.where((samples.counts > 1)[samples.index], score - baseline[samples.index], 0.0)
    return samples.to_rows(advantages, scores.dtype)


def maxrl(scores: Tensor, groups: Tensor, trajectories: Tensor) -> Tensor:
    """Returns (n,) score minus the mean score of the prompt, divided by this mean: MaxRL, arXiv:2602.02710.

    Where K of N samples are right (score 1, else 0), sum(A_i grad log pi_i) / N is the mean of grad log pi over the
    right samples minus that over all, the paper's estimator with its control variate. With p, the probability of a
    right sample, its expectation is the gradient of -sum((1 - p)^k / k) for k from 1 to N - 1, which tends to log p: a
    prompt counts the more, the smaller its p.

    Args:
        scores, groups, trajectories: (n,), see the module; UserError for a score below 0. A group of zeros has 0.
    """
    if bool((scores < 0).any()):
        raise UserError(
            f"reward: it is {scores.min():g} for a sample, and MaxRL divides by the mean reward of a prompt. "
            "Return rewards from 0 to 1"
        )
    samples = _Samples(groups, trajectories, scores)
    means = samples.means(scores)
    return samples.to_rows(samples.centered(scores) / torch.where(means > 0, means, 1.0), scores.dtype)


def pass_at_k(scores: Tensor, groups: Tensor, trajectories: Tensor, k: int) -> Tensor:
    """Returns (n,) advantages of samples of whose k-subsets the best score is the reward: arXiv:2508.10751.

    Of N samples of a prompt M are wrong. The mean score of a subset of k is R = 1 - C(M, k) / C(N, k), its standard
    deviation s = sqrt(R (1 - R)). A right sample has (1 - R) / (s + 1e-6), a wrong one that minus the share of its
    subsets in which all others are wrong too, C(M - 1, k - 1) / C(N - 1, k - 1), over s + 1e-6. With k = 1 these are
    GRPO's, but for the unbiased deviation. Scores [1, 0, 0, 0] and k = 2 give [1, -0.33, -0.33, -0.33].

    Args:
        scores, groups, trajectories: (n,), see the module; UserError for a score other than 0 and 1.
        k: tries of which one has to be right, at least 1; UserError for any other. A prompt with k samples or fewer,
            as of an agent that has not acted in each episode, has only one subset, and with it the advantage 0.
    """
    if bool(((scores != 0) & (scores != 1)).any()):
        other = float(scores[(scores != 0) & (scores != 1)][0])
        raise UserError(
            f"reward: it is {other:g} for a sample, and pass@k counts right and wrong ones. Return rewards of 0 and 1"
        )
    samples = _Samples(groups, trajectories, scores)
    sizes = samples.counts.tolist()
    if k < 1:
        raise UserError(f"pass@k: k is {k}. Write at least 1")
    rights = segment_sums(samples.sorted(scores).double(), samples.counts).long().tolist()
    # Quotients of integers: binomials of many samples have more digits than a float.
    numbers = []
    for size, right in zip(sizes, rights, strict=True):
        wrong, tries = size - right, min(k, size)
        failing = math.comb(wrong, tries) / math.comb(size, tries)
        deviation = math.sqrt(failing * (1 - failing)) + EPSILON
        alone = math.comb(wrong - 1, tries - 1) / math.comb(size - 1, tries - 1) if wrong else 0.0
        numbers.append((failing / deviation, (failing - alone) / deviation))
    of_right, of_wrong = torch.tensor(numbers, dtype=torch.float64, device=scores.device).reshape(-1, 2).unbind(1)
    chosen = torch.where(samples.sorted(scores) == 1, of_right[samples.index], of_wrong[samples.index])
    return samples.to_rows(chosen, scores.dtype)


def gdpo(rewards: Sequence[Tensor], weights: Sequence[float], groups: Tensor, trajectories: Tensor) -> Tensor:
    """Returns (n,) the weighted sum of the group-relative advantages of several rewards: GDPO, arXiv:2601.05242.

    sum_k w_k (r_k - mean r_k) / (std r_k + 1e-6) with mean and standard deviation over the prompt's samples, so
    samples whose rewards differ in only one of them have different advantages. `whiten` the sums over the batch, a
    sample counting once, which keeps their size whatever the number of rewards.

    Args:
        rewards: (n,) float each; NaN for a sample without this reward, which then does not count in it.
        weights: w_k of each reward.
        groups, trajectories: (n,), see the module.
    """
    total = torch.zeros_like(rewards[0])
    for reward, weight in zip(rewards, weights, strict=True):
        known = ~reward.isnan()
        total[known] += weight * group_relative(reward[known], groups[known], trajectories[known])
    return total


def remax(scores: Tensor, greedy_scores: Tensor) -> Tensor:
    """Returns (n,) score minus the greedy response's score, of the same prompt: ReMax, arXiv:2310.10505, algorithm 1.

    Args:
        scores, greedy_scores: (n,) float; entry i of the second is of the prompt of row i of the first.
    """
    return scores - greedy_scores


def differ(scores: Sequence[float]) -> bool:
    """Returns whether the scores of all samples of a group differ, compared exactly, so that it is `informative`."""
    return min(scores) < max(scores)


def informative(scores: Tensor, groups: Tensor, trajectories: Tensor) -> Tensor:
    """Returns (n,) bool, whether the scores of a sample's group differ, so that its advantage is not 0.

    DAPO's dynamic sampling keeps only these (arXiv:2503.14476, equation 11). GPG multiplies the advantages by all
    samples over these, both counted over all ranks (accurate gradient estimation, arXiv:2504.02546).

    Args:
        scores, groups, trajectories: (n,), see the module; scores are compared exactly.
    """
    samples = _Samples(groups, trajectories, scores)
    last, ordered = samples.counts.cumsum(0) - 1, samples.sorted(scores)
    # Sorted by score within a group: the first and the last one differ if any two do.
    differ = ordered[last] != ordered[last - samples.counts + 1]
    return samples.to_rows(differ[samples.index], torch.bool)


def group_means(scores: Tensor, groups: Tensor, trajectories: Tensor) -> Tensor:
    """Returns (n,) float64 mean score of a sample's group, so that comparisons with decimal fractions are exact.

    PRIME's online prompt filtering keeps groups with a mean outcome from 0.2 to 0.8 (arXiv:2502.01456, section 3.3).

    Args:
        scores, groups, trajectories: (n,), see the module.
    """
    samples = _Samples(groups, trajectories, scores)
    return samples.to_rows(samples.means(scores), torch.float64)


class _Samples:
    """Samples sorted by group, and then by `keys`: `index` is the group of each, `counts` the samples of each group."""

    def __init__(self, groups: Tensor, trajectories: Tensor, *keys: Tensor) -> None:
        distinct, self._sample_of = trajectories.unique(return_inverse=True)
        rows = torch.arange(len(trajectories), device=trajectories.device)
        # One row of each: the smallest, as of several writes to one place a device may keep any.
        first = rows.new_zeros(len(distinct)).scatter_reduce_(0, self._sample_of, rows, "amin", include_self=False)
        self._order = torch.arange(len(distinct), device=groups.device)
        # Sorted by the values too: the order of a sum decides its rounding, and must not depend on the order of rows.
        for key in (*reversed(keys), groups):
            self._order = self._order[torch.argsort(key[first][self._order], stable=True)]
        self._rows = first[self._order]
        _, self.index, self.counts = torch.unique_consecutive(
            groups[self._rows], return_inverse=True, return_counts=True
        )

    def sorted(self, column: Tensor) -> Tensor:
        return column[self._rows]

    def means(self, column: Tensor) -> Tensor:
        """Returns the float64 mean of each sample's group."""
        return (segment_sums(self.sorted(column).double(), self.counts) / self.counts)[self.index]

    def centered(self, column: Tensor) -> Tensor:
        return self.sorted(column).double() - self.means(column)

    def to_rows(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the sorted samples' values for each row."""
        return torch.empty_like(values, dtype=dtype).index_copy_(0, self._order, values.to(dtype))[self._sample_of]


def soft_overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Returns (n,) float32 penalty of long responses, from -1 to 0: DAPO, arXiv:2503.14476, equation 13.

    0 up to max_length - buffer tokens, from there falling in a line to -1 at max_length, and -1 above.

    Args:
        lengths: (n,) tokens of the responses.
        max_length: tokens; 20480 in the paper.
        buffer: tokens, from 1 to max_length; 4096 in the paper.
    """
    if not 1 <= buffer <= max_length:
        raise UserError(f"the overlong buffer is {buffer} tokens of {max_length}. Write 1 to {max_length}")
    return ((max_length - buffer - lengths).double() / buffer).clamp(-1, 0).float()
