"""OTB: the optimal token baseline (arXiv:2602.07078).

    prompts -> rollout -> reward -> old and reference log-probs -> advantages -> actor update -> weight sync

Differences from GRPO:

- each token has its own baseline, the one of least variance: the mean reward of the group's responses that are as long,
  weighted by the squared norm of the gradient so far, which the probabilities of the forward pass give
- no division by the standard deviation
- every token has the same weight, whatever the length of its response, as by default in the authors' code
"""

from functools import partial

from pydantic import Field, PositiveInt

from verl_mg.algorithms.advantages import optimal_token_baseline
from verl_mg.algorithms.aggregation import LossAggregation
from verl_mg.algorithms.losses import clipped_policy_loss
from verl_mg.config import RecipeConfig
from verl_mg.job.job import RunningJob
from verl_mg.recipes.common.entropy import add_entropy_bonus
from verl_mg.recipes.common.kl import KLConfig, adapt_kl, add_kl_loss, kl_sums, token_rewards_with_kl, with_current_kl
from verl_mg.recipes.common.off_policy import OffPolicyConfig, add_off_policy_weights, apply_off_policy_weights
from verl_mg.training.loss_inputs import LossInputs, LossOutput


class Config(RecipeConfig):
    prompts_per_iteration: PositiveInt = 64
    """Number of prompts that are trained on in an iteration."""
    group_size: int = Field(8, ge=2)
    """Number of responses to each prompt."""
    clip_low: float = Field(0.2, gt=0)
    """Distance of the lower bound of the ratio from 1."""
    clip_high: float = Field(0.2, gt=0)
    """Distance of the upper bound of the ratio from 1."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the ratio where the advantage is below 0; null sets no bound."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy of each token's distribution, which is subtracted from the loss."""
    kl: KLConfig = KLConfig()
    """Penalty on the divergence from the reference policy."""
    off_policy: OffPolicyConfig = OffPolicyConfig()
    """Correction of the difference between rollout engine and trainer."""
    loss_aggregation: LossAggregation = "token-mean"
    """Reduction of the token losses to one number: averages over tokens or over responses."""
    num_minibatches: PositiveInt = 1
    """Number of optimizer steps in an epoch, each with an equal part of the samples."""
    num_epochs: PositiveInt = 1
    """Number of passes over the samples of an iteration."""


def roles(cfg: Config) -> set[str]:
    return {"actor", "rollout", "reward"} | ({"reference"} if cfg.kl.enabled else set())


def policy_loss(inputs: LossInputs, cfg: Config) -> LossOutput:
    loss = clipped_policy_loss(
        inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.mask, cfg.clip_low, cfg.clip_high, cfg.dual_clip
    )
    loss = apply_off_policy_weights(loss, inputs, cfg.off_policy)
    loss = add_entropy_bonus(loss, inputs, cfg.entropy_coefficient)
    return add_kl_loss(loss, inputs, cfg.kl)


def iteration(job: RunningJob, cfg: Config) -> dict[str, float]:
    cfg = with_current_kl(cfg, job.state)
    prompts = job.prompts.next_batch(cfg.prompts_per_iteration)
    batch = job.rollout.generate(prompts, num_samples=cfg.group_size)  # responses are scored as they complete
    batch["reward"] = job.reward.wait(batch)

    with job.concurrent_roles():
        batch["old_outputs"] = job.actor.compute_logprobs(batch, squares=True)
        if cfg.kl.enabled:
            batch["ref_logprobs"] = job.reference.compute_logprobs(batch)
    batch["old_logprobs"] = batch["old_outputs"][:, 0]
    add_off_policy_weights(batch, cfg.off_policy, job.all_reduce_sum)

    rewards, mask = token_rewards_with_kl(batch, cfg.kl)
    logprobs, squares = batch.pad("old_outputs")[0][..., :2].unbind(-1)
    weights = batch.pad("correction")[0] if cfg.off_policy.enabled else None
    groups = batch["group"][batch.first_rows]
    batch["advantages"] = batch.unpad(optimal_token_baseline(rewards, mask, groups, logprobs, squares, weights))

    metrics = job.actor.update(
        batch,
        partial(policy_loss, cfg=cfg),
        cfg.loss_aggregation,
        num_minibatches=cfg.num_minibatches,
        num_epochs=cfg.num_epochs,
        max_length=job.config.rollout.max_new_tokens,
    )
    job.rollout.update_weights(job.actor)
    kl_metrics = adapt_kl(cfg.kl, job.all_reduce_sum(kl_sums(batch)), job.state) if cfg.kl.enabled else {}
    return {**metrics, **kl_metrics}
