"""Correction of the difference between the policy that sampled and the policy in training, a weight for each token.

A weight by a ratio and rejections by criteria can be combined; the rules are in verl_mg/algorithms/correction.py.
Off-policy sequence masking and score centering, see verl_mg/algorithms/centering.py, can be added to any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from verl_mg.algorithms.centering import expected_weight, sampler_probabilities
from verl_mg.algorithms.correction import (
    Criterion,
    Ratio,
    drifted_sequences,
    importance_weights,
    log_ratios,
    rejected,
    weight_sums,
    with_other_token,
)
from verl_mg.algorithms.losses.policy import masked_constant
from verl_mg.batch import Batch
from verl_mg.config import ConfigSection
from verl_mg.lazy_import import lazy_import
from verl_mg.training.loss_inputs import LossInputs, LossOutput
from verl_mg.training.microbatch import SAMPLER_TOP

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

COLUMNS = ("correction", "correction_below", "correction_above", "correction_rejected")
Bounds = float | tuple[float, float]


def _fit_their_criteria(rejection: dict[Criterion, Bounds]) -> dict[Criterion, Bounds]:
    for criterion, bounds in rejection.items():
        if criterion.endswith("k1"):
            if not isinstance(bounds, tuple) or not 0 <= bounds[0] <= 1 <= bounds[1] < float("inf"):
                raise ValueError(f"{criterion} has two bounds of a ratio, around 1. Write [0.5, 2.0]")
        elif isinstance(bounds, tuple) or not 0 < bounds < float("inf"):
            raise ValueError(f"{criterion} has one upper bound, in nats above 0. Write 0.01")
    return rejection


Rejection = Annotated[dict[Criterion, Bounds], AfterValidator(_fit_their_criteria)]


class OffPolicyConfig(ConfigSection):
    """Correction for log-probs of the rollout engine that differ from the trainer's."""

    weight: Literal["none", Ratio] = "none"
    """Ratio of the trainer's to the engine's probability that weights the loss of a token: its own, the product over
    its sequence, or the geometric mean over its sequence."""
    low: float | None = Field(None, ge=0, le=1)
    """Lower bound of the ratio: out of both bounds the weight is 0 (IcePop). null: ratios above `high` count as `high`
    (truncated importance sampling)."""
    high: float = Field(2.0, ge=1)
    """Upper bound of the ratio."""
    normalize: bool = False
    """Divides the weights by their mean over the iteration: over all tokens, or over all sequences where the ratio is
    of sequences."""
    rejection: Rejection = Field({})
    """Criteria by which tokens are left out of the loss, each with its bounds: token-k1, sequence-sum-k1 and
    sequence-mean-k1 with bounds of the ratio, [0.5, 2.0]; token-, sequence-sum-, sequence-mean- and sequence-max-, each
    with k2 or k3, with an upper bound in nats, 0.01."""
    opsm_delta: float | None = Field(None, gt=0)
    """Off-policy sequence masking (DeepSeek-V3.2): a response with a negative advantage is excluded from the loss where
    the mean of its log-ratio of rollout to current policy is above this number of nats. null excludes none."""
    score_centering: int | None = Field(None, ge=1)
    """Subtracts from the loss of each token what the engine's distribution, not the token that it drew, contributes
    (arXiv:2609.20807): the number of likeliest tokens whose log-probs the engine returns for it, such as 32. Others
    count by the trainer's own probabilities. null: no score centering."""

    @model_validator(mode="after")
    def _bounds_have_a_weight(self) -> Self:
        defaults = OffPolicyConfig.model_fields
        for name in ("low", "high", "normalize"):
            if self.weight == "none" and getattr(self, name) != defaults[name].default:
                raise ValueError(f"{name} is of the weight, and there is none. Write weight=token, or leave it out")
        return self

    @property
    def enabled(self) -> bool:
        """Whether the loss is weighted by a correction, or centred."""
        return self.weight != "none" or bool(self.rejection) or self.score_centering is not None


def add_off_policy_weights(
    batch: Batch, off_policy: OffPolicyConfig, all_reduce_sum: Callable[[Tensor], Tensor]
) -> None:
    """Sets the token columns COLUMNS, `correction_below` and `correction_above` only with a weight, if enabled.

    With score centering also `centering` and `old_top`: the last numbers of `old_outputs`, or else `old_logprobs`, are
    log-probs of the engine's likeliest tokens.

    Args:
        batch: columns `old_logprobs`, `rollout_logprobs` and `loss_mask`; a sequence is a whole trajectory.
        off_policy: the correction.
        all_reduce_sum: sum over all ranks, as of the job, for the mean of all weights.
    """
    if not off_policy.enabled:
        return
    if off_policy.score_centering is not None:
        outputs = batch["old_outputs" if "old_outputs" in batch else "old_logprobs"]
        batch["old_logprobs"], batch["old_top"] = outputs[:, 0], outputs[:, -off_policy.score_centering :]
    mask, ids = batch["loss_mask"], batch.expand_to_tokens(batch.trajectory_index)
    difference = log_ratios(batch["old_logprobs"], batch["rollout_logprobs"], mask)
    weights, outside, scale = mask.float(), torch.zeros_like(mask), 1.0
    if off_policy.weight != "none":
        weights, columns = importance_weights(off_policy.weight, difference, mask, ids, off_policy.low, off_policy.high)
        for name, column in columns.items():
            batch[name] = column
        if off_policy.normalize:
            # Before rejections: a sample that is left out makes no other one heavier.
            total, count = all_reduce_sum(weight_sums(off_policy.weight, weights, mask, ids)).tolist()
            scale = count / total if total > 0 else 1.0
            weights = weights * scale
    for criterion, bounds in off_policy.rejection.items():
        outside = outside | rejected(criterion, difference, mask, ids, *_both(bounds))
    batch["correction"], batch["correction_rejected"] = torch.where(outside, 0.0, weights), outside.float()
    if off_policy.score_centering is not None:
        sampled, others = sampler_probabilities(batch[SAMPLER_TOP][:, 0], batch["old_top"])
        batch["centering"] = sampled * scale * _weights_of_others(off_policy, difference, others, mask, ids)


def _both(bounds: Bounds) -> tuple[float, float]:
    return bounds if isinstance(bounds, tuple) else (0.0, bounds)


def _weights_of_others(
    off_policy: OffPolicyConfig, difference: Tensor, others: Tensor, mask: Tensor, ids: Tensor
) -> Tensor:
    """Returns (tokens, n) the weights of other tokens with log-ratios `others` in the place of each token."""
    each = mask[:, None].expand(others.shape)
    weights = each.float()
    if off_policy.weight != "none":
        ratios = with_other_token(off_policy.weight, difference, others, mask, ids)
        weights, _ = importance_weights("token", ratios, each, ids, off_policy.low, off_policy.high)
    for criterion, bounds in off_policy.rejection.items():
        # A token is rejected by its own ratio. A sequence is rejected as it is: one other token hardly matters there,
        # and its loss has the weight 0 with or without centering.
        if criterion.startswith("token-"):
            outside = rejected(criterion, others, each, ids, *_both(bounds))
        else:
            outside = rejected(criterion, difference, mask, ids, *_both(bounds))[:, None]
        weights = torch.where(outside, 0.0, weights)
    return weights


def apply_off_policy_weights(output: LossOutput, inputs: LossInputs, off_policy: OffPolicyConfig) -> LossOutput:
    """Returns the loss times the weight of each token, with the weights and their bounds among the metrics.

    Score centering adds the advantage times the weight that is expected under the sampler, with the metrics of
    `expected_weight`. A response that off-policy sequence masking excludes has the weight 0; the metric `opsm_masked`
    is 1 there.

    Args:
        output: (tokens,) loss and its metrics; its gradient before the first step is that of -A logprobs.
        inputs: tokens of the micro-batch, with the columns of `add_off_policy_weights` and `rollout_logprobs`.
        off_policy: the correction; without it the output is returned as it is.
    """
    loss, metrics = output
    if off_policy.enabled:
        loss = loss * inputs["correction"]
        metrics = metrics | {name: inputs[name] for name in COLUMNS if name in inputs}
    if off_policy.score_centering is not None:
        expected, centering = expected_weight(
            inputs.likeliest_logprobs, inputs["old_top"], inputs[SAMPLER_TOP][:, 0], inputs["centering"]
        )
        loss, metrics = loss + masked_constant(inputs.mask, inputs.advantages) * expected, metrics | centering
    # Here, not with the weights of the batch: it depends on the policy in training, which each step changes.
    if off_policy.opsm_delta is not None:
        drifted = drifted_sequences(
            inputs.logprobs,
            inputs["rollout_logprobs"],
            inputs.advantages,
            inputs.mask,
            inputs.sequence_ids,
            off_policy.opsm_delta,
        )
        loss, metrics = torch.where(drifted, 0.0, loss), metrics | {"opsm_masked": drifted.to(loss.dtype)}
    return loss, metrics
