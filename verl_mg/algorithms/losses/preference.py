"""Losses of whole sequences: which of two is better, or whether one is right.

The rows of a pair share a number in `pair` (tokens,) int64, and `chosen` (tokens,) bool is true on the better one;
both rows are whole in a micro-batch. Every scored token carries the loss of its pair or sequence, which depends on
all log-probs of it: aggregated by "seq-mean-token-mean", value and gradient are the mean over pairs or sequences.
Every scored token carries the metrics too: aggregate them likewise, a mean over tokens favours long pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_mg.algorithms.aggregation import segment_totals, sequence_sums
from verl_mg.algorithms.losses.policy import Metrics, check_positive, masked, masked_constant
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import functional
else:
    functional = lazy_import("torch.nn.functional")

DPO_KINDS = ("sigmoid", "hinge", "ipo")


def dpo_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    pair: Tensor,
    chosen: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    kind: str = "sigmoid",
) -> tuple[Tensor, Metrics]:
    """Returns (tokens,) the loss of direct preference optimisation, and metrics of the pair.

    With h = (log pi - log ref)(chosen) - (log pi - log ref)(rejected), sums over scored tokens for every kind:

        kind        loss of a pair                                        source
        "sigmoid"   -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h) DPO, arXiv:2305.18290, equation 7; with
                                                                          label smoothing e: conservative DPO
        "hinge"     max(0, 1 - beta h)                                    RSO, arXiv:2309.06657
        "ipo"       (h - 1 / (2 beta))^2                                  IPO, arXiv:2310.12036, equation 17

    Metrics: `accuracy` (1 where h > 0), `margin` (beta h), `chosen_reward` and `rejected_reward` (beta (log pi - log
    ref)).

    Args:
        logprobs, ref_logprobs: (tokens,) nats, of the policy, which has the only gradient, and the reference.
        mask: (tokens,) bool, true on scored tokens.
        pair, chosen: (tokens,) as above; UserError if a row of a pair is missing here.
        beta: above 0.
        label_smoothing: e, from 0 to below 0.5; only for "sigmoid".
        kind: one of DPO_KINDS; UserError for any other.
    """
    if kind not in DPO_KINDS:
        raise UserError(f"DPO loss {kind!r} is unknown. Write one of {', '.join(DPO_KINDS)}")
    check_positive("beta", beta, "0.1")
    if not 0 <= label_smoothing < 0.5 or (label_smoothing and kind != "sigmoid"):
        raise UserError(f"label_smoothing is {label_smoothing}. Write 0 to below 0.5, and 0 for any loss but sigmoid")
    _check_pairs(mask, pair, chosen)
    difference = masked(mask, logprobs) - masked_constant(mask, ref_logprobs)
    # Every token of a pair gets both sums, so that either of its rows has the whole loss.
    better, worse = (sequence_sums(masked(side, difference), pair) for side in (chosen, ~chosen))
    margin = beta * (better - worse)
    if kind == "sigmoid":
        loss = -(1 - label_smoothing) * functional.logsigmoid(margin) - label_smoothing * functional.logsigmoid(-margin)
    elif kind == "hinge":
        loss = (1 - margin).clamp(min=0)
    else:
        loss = (better - worse - 1 / (2 * beta)).square()
    return masked(mask, loss), _pair_metrics(mask, beta * better, beta * worse)


def bradley_terry_loss(scores: Tensor, mask: Tensor, pair: Tensor, chosen: Tensor) -> tuple[Tensor, Metrics]:
    """Returns (tokens,) -log sigmoid(score of the chosen row - score of the rejected): arXiv:2203.02155, equation 1.

    Metrics of the pair: `accuracy` (1 where the chosen row scores higher), `margin`, `chosen_reward`,
    `rejected_reward`.

    Args:
        scores, mask: (tokens,) of the reward model in training; true on the one token of each row with its score.
        pair, chosen: (tokens,) as above; UserError if a row of a pair is missing here.
    """
    _check_pairs(mask, pair, chosen)
    scores = masked(mask, scores)
    better, worse = (sequence_sums(masked(side, scores), pair) for side in (chosen, ~chosen))
    return masked(mask, -functional.logsigmoid(better - worse)), _pair_metrics(mask, better, worse)


def prime_loss(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor, labels: Tensor, beta: float
) -> tuple[Tensor, Metrics]:
    """Returns (tokens,) cross-entropy of the outcome under an implicit process reward model: PRIME, arXiv:2502.01456.

    A response is right with probability sigmoid(sum over its tokens of beta (log pi - log ref)). Metrics of the
    sequence: `accuracy` (1 where the sum has the sign of the label) and `implicit_reward` (the sum).

    Args:
        logprobs, ref_logprobs: (tokens,) nats, of the reward model, which has the only gradient, and before training.
        mask: (tokens,) bool, true on scored tokens.
        sequence_ids: (tokens,) int64, whole sequences; a segment is one, with the outcome of its trajectory.
        labels: (tokens,) from 0 (wrong) to 1 (right), the same on all tokens of a sequence.
        beta: above 0; 0.05 in the paper.
    """
    check_positive("beta", beta, "0.05")
    labels = masked_constant(mask, labels)
    difference = masked(mask, logprobs) - masked_constant(mask, ref_logprobs)
    reward = beta * sequence_sums(difference, sequence_ids)
    loss = -labels * functional.logsigmoid(reward) - (1 - labels) * functional.logsigmoid(-reward)
    seen = reward.detach()
    right = (seen > 0) == (labels > 0.5)
    return masked(mask, loss), {"accuracy": (mask & right).to(seen.dtype), "implicit_reward": masked(mask, seen)}


def _pair_metrics(mask: Tensor, better: Tensor, worse: Tensor) -> Metrics:
    better, worse = masked(mask, better.detach()), masked(mask, worse.detach())
    return {
        "accuracy": (better > worse).to(better.dtype),
        "margin": better - worse,
        "chosen_reward": better,
        "rejected_reward": worse,
    }


def _check_pairs(mask: Tensor, pair: Tensor, chosen: Tensor) -> None:
    alone = (segment_totals(mask & chosen, pair) == 0) | (segment_totals(mask & ~chosen, pair) == 0)
    if bool((mask & alone).any()):
        number = int(pair[(mask & alone).nonzero()[0, 0]])
        raise UserError(
            f"pair {number}: a row is in another micro-batch or has no scored token. Keep rows of a pair together"
        )
