"""Off-policy correction for rollout log-probs that differ from the trainer's: a weight for every token.

The engine that samples and the trainer that differentiates never agree to the last digit (other kernels, another
precision, weights of an earlier update): training data are samples of another policy. A correction is a ratio r
and a rule that turns it into a weight, with d = old_logprobs - rollout_logprobs:

    ratio       r of a token                                            rule        weight of a token
    token       exp(d)                                                  tis         min(r, high)
    sequence    exp(sum of d over the scored tokens of its sequence)    icepop      r if low <= r <= high, else 0
    geometric   exp(mean of d over the same tokens)                     rejection   1 if low <= r <= high, else 0

No gradient flows through the weights. A rejected token still counts in the normalizer of `aggregation`, so a bad
sample makes the step smaller and no other sample heavier.

Sequence ratios need whole sequences: compute weights on the batch of a recipe, which has whole trajectories, and
give them to the loss as a token column. Then micro-batches, packing and context parallelism cannot change them.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from verl_mg.algorithms.aggregation import sequence_means
from verl_mg.algorithms.losses import Metrics
from verl_mg.errors import UserError

Correction = Literal[
    "token-tis",
    "sequence-tis",
    "geometric-tis",
    "icepop",
    "token-rejection",
    "sequence-rejection",
    "geometric-rejection",
]
KINDS: tuple[str, ...] = get_args(Correction)


def correct(
    kind: str,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    low: float,
    high: float,
) -> tuple[Tensor, Metrics]:
    """Returns (tokens,) float32 weights of the loss of each token, 0 outside the mask, and metrics.

    A kind names ratio and rule. "token-tis" is of Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training"; "sequence-tis" and "sequence-rejection" of Liu et al. 2025, "When Speed Kills Stability:
    Demystifying RL Collapse from the Training-Inference Mismatch"; the geometric ratio is GSPO's, arXiv:2507.18071,
    equation 7; "icepop", of token ratios, is Ring-1T's, arXiv:2510.18855.

    The metrics `correction_below` and `correction_above` are 1 where the ratio is below `low` or above `high`.

    Args:
        kind: one of `Correction`; UserError for any other.
        old_logprobs: (tokens,) nats, of the policy in training at the start of the iteration.
        rollout_logprobs: (tokens,) nats, as the rollout engine sampled, each token under the weights that wrote it.
        mask: (tokens,) bool, true on scored tokens; values outside it are ignored, NaN too.
        sequence_ids: (tokens,) int64, index from 0 of a token's sequence; every sequence is here as a whole.
        low, high: bounds of the ratio, 0 <= low <= 1 <= high; "tis" ignores `low`.
    """
    if kind not in KINDS:
        raise UserError(f"correction {kind!r} is unknown. Write one of {', '.join(KINDS)}")
    if not 0 <= low <= 1 <= high < float("inf"):
        raise UserError(f"correction bounds {low} and {high}: 1 is not between them. Write bounds such as 0.5 and 2.0")
    ratio_kind, _, rule = kind.rpartition("-")
    difference = torch.where(mask, old_logprobs.detach().float() - rollout_logprobs.detach().float(), 0.0)
    # May overflow to infinity, which every rule limits to its bounds or replaces by 0.
    ratio = LOG_RATIOS[ratio_kind](difference, mask, sequence_ids).exp()
    weights = torch.where(mask, RULES[rule](ratio, low, high), 0.0)
    outside = {"correction_below": mask & (ratio < low), "correction_above": mask & (ratio > high)}
    return weights, {name: where.float() for name, where in outside.items()}


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
    # Not a weight of `correct`: it depends on the policy in training and is made in the loss.
    if not delta > 0:
        raise UserError(f"opsm_delta is {delta}. Write a number above 0, as in 0.5")
    difference = torch.where(mask, rollout_logprobs.detach() - logprobs.detach(), 0.0)
    drift = sequence_means(difference, mask, sequence_ids)
    return mask & (advantages < 0) & (drift > delta)


def _of_sequence(difference: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    # The sequence of an agent is its trajectory: its probability is the product over all tokens that the policy wrote;
    # the factors of the environment cancel out in the ratio.
    # float64: the sum over a long sequence keeps the digits by which its ratio differs from 1.
    return torch.bincount(sequence_ids, difference.double())[sequence_ids].float()


def _geometric(difference: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    counts = torch.bincount(sequence_ids, mask.double()).clamp(min=1)
    return (torch.bincount(sequence_ids, difference.double()) / counts)[sequence_ids].float()


LOG_RATIOS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(("token", ""), lambda difference, mask, sequence_ids: difference),  # "": icepop names a rule only
    "sequence": _of_sequence,
    "geometric": _geometric,
}
RULES: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "tis": lambda ratio, low, high: ratio.clamp(max=high),
    "icepop": lambda ratio, low, high: torch.where((ratio >= low) & (ratio <= high), ratio, 0.0),
    "rejection": lambda ratio, low, high: ((ratio >= low) & (ratio <= high)).float(),
}
