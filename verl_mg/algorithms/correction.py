"""Off-policy correction for rollout log-probs that differ from the trainer's: weights of tokens, and rejections.

The engine that samples and the trainer that differentiates never agree to the last digit (other kernels, another
precision, weights of an earlier update): training data are samples of another policy. With d = old_logprobs -
rollout_logprobs a weight is a ratio r within bounds:

    ratio       r of a token                                            bounds         weight of a token
    token       exp(d)                                                  high           min(r, high)
    sequence    exp(sum of d over the scored tokens of its sequence)    low and high   r if low <= r <= high, else 0
    geometric   exp(mean of d over the same tokens)

A rejection leaves out tokens whose statistic is out of bounds. It is the sum, mean or largest value over a sequence, or
the value of the token itself, of one of three estimates of the divergence:

    k1   d               kept where low <= exp(statistic) <= high, a ratio of the table above
    k2   d^2 / 2         kept where the statistic is at most high, nats
    k3   exp(d) - 1 - d  likewise

No gradient flows through either. A rejected token still counts in the normalizer of `aggregation`, so a bad sample
makes the step smaller and no other sample heavier.

Ratios of sequences need whole sequences: compute weights on the batch of a recipe, which has whole trajectories, and
give them to the loss as a token column. Then micro-batches, packing and context parallelism cannot change them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

from verl_mg.algorithms import kl
from verl_mg.algorithms.aggregation import sequence_means
from verl_mg.algorithms.losses import Metrics
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

Ratio = Literal["token", "sequence", "geometric"]
Criterion = Literal[
    "token-k1",
    "token-k2",
    "token-k3",
    "sequence-sum-k1",
    "sequence-sum-k2",
    "sequence-sum-k3",
    "sequence-mean-k1",
    "sequence-mean-k2",
    "sequence-mean-k3",
    "sequence-max-k2",
    "sequence-max-k3",
]
RATIOS: tuple[str, ...] = get_args(Ratio)
CRITERIA: tuple[str, ...] = get_args(Criterion)


def log_ratios(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Returns (tokens,) float32 d, 0 outside the mask.

    Args:
        old_logprobs: (tokens,) nats, of the policy in training at the start of the iteration.
        rollout_logprobs: (tokens,) nats, as the rollout engine sampled, each token under the weights that wrote it.
        mask: (tokens,) bool, true on scored tokens; values outside it are ignored, NaN too.
    """
    return torch.where(mask, old_logprobs.detach().float() - rollout_logprobs.detach().float(), 0.0)


def importance_weights(
    ratio: str, difference: Tensor, mask: Tensor, sequence_ids: Tensor, low: float | None, high: float
) -> tuple[Tensor, Metrics]:
    """Returns (tokens,) float32 weights of the loss of each token, 0 outside the mask, and metrics.

    Truncated weights of tokens are of Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", weights of sequences of Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch"; the geometric ratio is GSPO's, arXiv:2507.18071, equation 7; both bounds, of token
    ratios, are IcePop's, Ring-1T, arXiv:2510.18855.

    The metrics `correction_below` and `correction_above` are 1 where the ratio is below `low` or above `high`.

    Args:
        ratio: one of RATIOS; UserError for any other.
        difference: (tokens,) result of `log_ratios`.
        mask: (tokens,) bool, true on scored tokens.
        sequence_ids: (tokens,) int64, index from 0 of a token's sequence; every sequence is here as a whole.
        low, high: bounds of the ratio, 0 <= low <= 1 <= high; without `low` ratios above `high` count as `high`.
    """
    if ratio not in RATIOS:
        raise UserError(f"weight {ratio!r} is unknown. Write one of {', '.join(RATIOS)}")
    _check_bounds(0.0 if low is None else low, high)
    # May overflow to infinity, which is limited to the bound or replaced by 0.
    value = OVER[OF_RATIO[ratio]](difference, mask, sequence_ids).exp()
    below, above = mask & (value < (low or 0.0)), mask & (value > high)
    weights = value.clamp(max=high) if low is None else torch.where(below | above, 0.0, value)
    return torch.where(mask, weights, 0.0), {"correction_below": below.float(), "correction_above": above.float()}


def with_other_token(ratio: str, difference: Tensor, others: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Returns (tokens, n) logarithms of a weight's ratio with another token in the place of each.

    The other tokens of its sequence stay: with d = [0.2, 0.4] of one sequence, a token with d = 0.5 in the place of the
    first makes 0.5, 0.9 and 0.45 for "token", "sequence" and "geometric".

    Args:
        ratio: one of RATIOS.
        difference, mask, sequence_ids: as in `importance_weights`.
        others: (tokens, n) d of the other tokens.
    """
    over = OVER[OF_RATIO[ratio]]
    # The statistics are linear in d: the change of one token counts by its share.
    changes = others - difference[:, None]
    count = torch.bincount(sequence_ids, mask.double()).clamp(min=1)[sequence_ids].float()
    share = 1 / count if ratio == "geometric" else torch.ones_like(count)
    return over(difference, mask, sequence_ids)[:, None] + share[:, None] * changes


def weight_sums(ratio: str, weights: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Returns (2,) float64 sum and number of the weights, one for each token or sequence; they add up over ranks.

    Args:
        ratio: one of RATIOS; the weights of "token" are counted by token, others by sequence.
        weights: (tokens,) result of `importance_weights`.
        mask, sequence_ids: as there.
    """
    share = mask.double()
    if ratio != "token":
        share = share / torch.bincount(sequence_ids, share).clamp(min=1)[sequence_ids]
    return torch.stack([(weights.double() * share).sum(), share.sum()])


def rejected(criterion: str, difference: Tensor, mask: Tensor, sequence_ids: Tensor, low: float, high: float) -> Tensor:
    """Returns (tokens,) bool: scored tokens whose statistic is out of bounds, see the module.

    Sequence rejection is of Liu et al. 2025, as above; "sequence-mean-k1" bounds the ratio of GSPO.

    Args:
        criterion: one of CRITERIA; UserError for any other.
        difference, mask, sequence_ids: as in `importance_weights`.
        low, high: bounds of the ratio for k1, 0 <= low <= 1 <= high; `high` is in nats for k2 and k3, which ignore
            `low`.
    """
    if criterion not in CRITERIA:
        raise UserError(f"rejection {criterion!r} is unknown. Write one of {', '.join(CRITERIA)}")
    over, _, estimator = criterion.rpartition("-")
    if estimator == "k1":
        _check_bounds(low, high)
        ratio = OVER[over](difference, mask, sequence_ids).exp()
        return mask & ((ratio < low) | (ratio > high))
    if not 0 < high < float("inf"):
        raise UserError(f"rejection {criterion}: the bound is {high}. Write a number of nats above 0, as in 0.01")
    # The estimate is of KL(rollout || trainer), of which the sampled token is a sample.
    return mask & (OVER[over](kl.ESTIMATORS[estimator](-difference), mask, sequence_ids) > high)


def drifted_sequences(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, mask: Tensor, sequence_ids: Tensor, delta: float
) -> Tensor:
    """Returns (tokens,) bool that off-policy sequence masking excludes: DeepSeek-V3.2, arXiv:2512.02556, equation 9.

    Tokens with an advantage below 0, of sequences whose mean of rollout_logprobs - logprobs, an estimate of the
    divergence by updates and by the engine together, is above `delta`. As in GSPO a segment of a trajectory is a
    sequence.

    Args:
        logprobs, rollout_logprobs: (tokens,) nats, of the policy in training and as the engine sampled.
        advantages, mask, sequence_ids: (tokens,) as in `losses.sequence`; outside the mask NaN is ignored too.
        delta: nats, above 0.
    """
    # No weight of the batch: it depends on the policy in training and is made in the loss.
    if not delta > 0:
        raise UserError(f"opsm_delta is {delta}. Write a number above 0, as in 0.5")
    difference = torch.where(mask, rollout_logprobs.detach() - logprobs.detach(), 0.0)
    drift = sequence_means(difference, mask, sequence_ids)
    return mask & (advantages < 0) & (drift > delta)


def _check_bounds(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high < float("inf"):
        raise UserError(f"correction bounds {low} and {high}: 1 is not between them. Write bounds such as 0.5 and 2.0")


def _sum(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    # The sequence of an agent is its trajectory: its probability is the product over all tokens that the policy wrote;
    # the factors of the environment cancel out in the ratio.
    # float64: the sum over a long sequence keeps the digits by which its ratio differs from 1.
    return torch.bincount(sequence_ids, values.double())[sequence_ids].float()


def _mean(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    counts = torch.bincount(sequence_ids, mask.double()).clamp(min=1)
    return (torch.bincount(sequence_ids, values.double()) / counts)[sequence_ids].float()


def _largest(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    # Of values that are not negative, and 0 outside the mask.
    maxima = values.new_zeros(int(sequence_ids.max()) + 1 if len(sequence_ids) else 0)
    return maxima.scatter_reduce_(0, sequence_ids, values, "amax")[sequence_ids]


OVER: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token": lambda values, mask, sequence_ids: values,
    "sequence-sum": _sum,
    "sequence-mean": _mean,
    "sequence-max": _largest,
}
OF_RATIO = {"token": "token", "sequence": "sequence-sum", "geometric": "sequence-mean"}
