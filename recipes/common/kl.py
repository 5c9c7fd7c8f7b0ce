"""KL penalty against the reference policy, in the loss or in the reward, with a fixed or an adaptive coefficient.

Estimators are in verl_mg/algorithms/kl.py. With a target, the coefficient follows arXiv:1909.08593, section 2.2,
within bounds if they are set.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self, TypeVar

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from verl_mg.algorithms import kl as estimators
from verl_mg.algorithms.advantages import token_rewards
from verl_mg.batch import Batch
from verl_mg.config import ConfigSection
from verl_mg.lazy_import import lazy_import
from verl_mg.training.loss_inputs import LossInputs, LossOutput

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

STATE_KEY = "kl_coefficient"
"""Name of the adapted coefficient in the state that a checkpoint keeps."""


class KLConfig(ConfigSection):
    """KL penalty: where it is added and how strongly."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the penalty, in loss or reward per nat. 0 turns it off, and no reference is built for it."""
    placement: Literal["loss", "reward"] = "loss"
    """Adds the penalty to the loss of each token, or subtracts it from the reward of each token."""
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    """Estimator of the divergence of a token. In a loss, the gradient of "k1" has expectation 0; write "k2" or "k3"."""
    target: float | None = Field(None, gt=0)
    """Mean divergence, in nats per token, towards which the coefficient is adapted; null keeps the coefficient."""
    horizon: PositiveInt = 10000
    """Number of samples over which a lasting error of 100 % would double the coefficient, without clipping."""
    min_coefficient: float = Field(0.0, ge=0)
    """Lower bound of the adapted coefficient; 0 is none, since a coefficient is only multiplied."""
    max_coefficient: float | None = Field(None, gt=0)
    """Upper bound of the adapted coefficient; null is none."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        has_bounds = self.min_coefficient > 0 or self.max_coefficient is not None
        if self.enabled and has_bounds and self.target is None:
            raise ValueError("min_coefficient and max_coefficient bound an adapted coefficient. Write a target too")
        if self.enabled and self.bounded(self.coefficient) != self.coefficient:
            raise ValueError(
                f"coefficient {self.coefficient} is not from min_coefficient to max_coefficient. Write one that is"
            )
        return self

    def bounded(self, coefficient: float) -> float:
        """Returns the nearest coefficient between the two bounds."""
        highest = float("inf") if self.max_coefficient is None else self.max_coefficient
        return min(max(coefficient, self.min_coefficient), highest)

    @property
    def enabled(self) -> bool:
        """Whether there is a penalty, and with it log-probs of the reference."""
        return self.coefficient != 0

    @property
    def in_reward(self) -> bool:
        """Whether there is a penalty that is subtracted from the rewards."""
        return self.enabled and self.placement == "reward"

    @property
    def in_loss(self) -> bool:
        """Whether there is a penalty that is added to the loss."""
        return self.enabled and self.placement == "loss"


def _in_loss(kl: KLConfig) -> KLConfig:
    if kl.in_reward:
        raise ValueError("kl.placement=reward has no meaning in this recipe, which compares only rewards. Write loss")
    return kl


KLInLoss = Annotated[KLConfig, AfterValidator(_in_loss)]
"""Penalty of a recipe whose advantages are not made of one reward for each sample, to which it could be added."""


class WithKL(Protocol):
    """Configuration of a recipe with a KL penalty."""

    @property
    def kl(self) -> KLConfig:
        """Subsection of the KL penalty."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Returns a copy with other values.

        Args:
            update: new values by field.
            deep: whether values are copied too.
        """


C = TypeVar("C", bound=WithKL)


def with_current_kl(cfg: C, state: Mapping[str, float | Batch]) -> C:
    """Returns the configuration with the coefficient that earlier iterations have adapted, if they have.

    Args:
        cfg: configuration of the recipe, which never changes.
        state: `job.state`, which checkpoints keep.
    """
    if not (cfg.kl.enabled and cfg.kl.target):
        return cfg
    coefficient = state.get(STATE_KEY, cfg.kl.coefficient)
    assert isinstance(coefficient, float)
    # Within bounds again: a resumed job may have other ones.
    kl = cfg.kl.model_copy(update={"coefficient": cfg.kl.bounded(coefficient)})
    return cfg.model_copy(update={"kl": kl})


def token_rewards_with_kl(batch: Batch, kl: KLConfig) -> tuple[Tensor, Tensor]:
    """Returns (t, T) rewards and the (t, T) bool mask of the tokens that the policy wrote; a line is a trajectory.

    The last token has the reward of the trajectory. With the penalty in the reward each token's penalty is
    subtracted:
    arXiv:2203.02155, equation 2.

    Args:
        batch: columns `reward` (n,) and `loss_mask`; with the penalty also `old_logprobs` and `ref_logprobs`.
        kl: ignored unless it is in the reward.
    """
    # Tables of trajectories, so that only the last token of an agent's last segment has the reward.
    mask, _ = batch.pad("loss_mask")
    rewards = token_rewards(batch["reward"][batch.first_rows], mask)
    if kl.in_reward:
        old, reference = batch.pad("old_logprobs")[0], batch.pad("ref_logprobs")[0]
        rewards = estimators.in_reward(rewards, old, reference, mask, kl.coefficient, kl.estimator)
    return rewards, mask


def rewards_with_kl(batch: Batch, kl: KLConfig) -> Tensor:
    """Returns (n,) rewards, minus the penalties of all tokens of a trajectory if the penalty is in the reward.

    Args:
        batch, kl: as in `token_rewards_with_kl`.
    """
    if not kl.in_reward:
        return batch["reward"]
    rewards, mask = token_rewards_with_kl(batch, kl)
    # Without a token there is no penalty.
    totals = torch.where(mask.any(1), rewards.sum(1), batch["reward"][batch.first_rows])
    return totals[batch.trajectory_index]


def add_kl_loss(output: LossOutput, inputs: LossInputs, kl: KLConfig) -> LossOutput:
    """Returns the loss with the penalty and its metric `kl`, in nats, if the penalty is in the loss.

    Args:
        output: (tokens,) loss and its metrics.
        inputs: tokens of the micro-batch, with `ref_logprobs`.
        kl: the penalty.
    """
    if not kl.in_loss:
        return output
    loss, metrics = output
    divergence = estimators.penalty(inputs.logprobs, inputs.ref_logprobs, kl.estimator)
    return loss + kl.coefficient * divergence, metrics | {"kl": divergence}


def kl_sums(batch: Batch) -> Tensor:
    """Returns (3,) float64: number of tokens, sum of their "k1" in nats, number of samples; they add up over ranks.

    Without `old_logprobs` the divergence is of the policy as the rollout engine reported it.
    """
    policy = batch["old_logprobs" if "old_logprobs" in batch else "rollout_logprobs"]
    divergence = estimators.penalty(policy, batch["ref_logprobs"], "k1")
    kept = divergence[batch["loss_mask"]].double()
    return torch.stack([kept.new_tensor(kept.numel()), kept.sum(), kept.new_tensor(len(batch.first_rows))])


def adapt_kl(kl: KLConfig, sums: Tensor, state: MutableMapping[str, float | Batch]) -> dict[str, float]:
    """Returns the metrics `kl/mean`, nats per token, and `kl/coefficient`; with a target sets the next coefficient.

    Args:
        kl: the penalty of this iteration.
        sums: (3,) `kl_sums`, added over all ranks.
        state: `job.state`, where the coefficient is kept.
    """
    num_tokens, total, num_samples = sums.tolist()
    mean = total / max(num_tokens, 1)
    if kl.target:
        adapted = estimators.adapted(kl.coefficient, mean, kl.target, kl.horizon, int(num_samples))
        state[STATE_KEY] = kl.bounded(adapted)
    return {"kl/mean": mean, "kl/coefficient": kl.coefficient}
