"""Correction of the difference between the policy that sampled and the policy in training, a weight for each token.

The rules are in verl_mg/algorithms/correction.py. Off-policy sequence masking can be added to any of them.
"""

from typing import Literal

import torch
from pydantic import Field

from verl_mg.algorithms.correction import Correction, correct, drifted_sequences
from verl_mg.batch import Batch
from verl_mg.config import ConfigSection
from verl_mg.training.loss_inputs import LossInputs, LossOutput

COLUMNS = ("correction", "correction_below", "correction_above")


class OffPolicyConfig(ConfigSection):
    """Correction for log-probs of the rollout engine that differ from the trainer's."""

    correction: Literal["none", Correction] = "none"
    """Ratio and rule that give the weight of a token; "none" leaves the loss as it is."""
    low: float = Field(0.5, ge=0, le=1)
    """Lower bound of the ratio; truncation ("*-tis") does not use it."""
    high: float = Field(2.0, ge=1, allow_inf_nan=False)
    """Upper bound of the ratio."""
    opsm_delta: float | None = Field(None, gt=0)
    """Off-policy sequence masking (DeepSeek-V3.2): a response with a negative advantage is excluded from the loss where
    the mean of its log-ratio of rollout to current policy is above this number of nats. null excludes none."""

    @property
    def enabled(self) -> bool:
        """Whether the loss is weighted by a correction."""
        return self.correction != "none"


def add_off_policy_weights(batch: Batch, off_policy: OffPolicyConfig) -> None:
    """Sets the token columns `correction`, `correction_below` and `correction_above` if the correction is enabled.

    Args:
        batch: columns `old_logprobs`, `rollout_logprobs` and `loss_mask`; a sequence is a whole trajectory.
        off_policy: the correction.
    """
    if not off_policy.enabled:
        return
    weights, outside = correct(
        off_policy.correction,
        batch["old_logprobs"],
        batch["rollout_logprobs"],
        batch["loss_mask"],
        batch.expand_to_tokens(batch.trajectory_index),
        off_policy.low,
        off_policy.high,
    )
    for name, column in {"correction": weights, **outside}.items():
        batch[name] = column


def apply_off_policy_weights(output: LossOutput, inputs: LossInputs, off_policy: OffPolicyConfig) -> LossOutput:
    """Returns the loss times the weight of each token, with the weights and their bounds among the metrics.

    A response that off-policy sequence masking excludes has the weight 0; the metric `opsm_masked` is 1 there.

    Args:
        output: (tokens,) loss and its metrics.
        inputs: tokens of the micro-batch, with the columns of `add_off_policy_weights` and `rollout_logprobs`.
        off_policy: the correction; without it the output is returned as it is.
    """
    loss, metrics = output
    if off_policy.enabled:
        loss, metrics = loss * inputs["correction"], metrics | {name: inputs[name] for name in COLUMNS}
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
