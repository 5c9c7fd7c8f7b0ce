"""Clip-Cov: no gradient from a few of the tokens that reduce the entropy most (arXiv:2505.22617).

    prompts -> rollout -> reward -> old and reference log-probs -> advantages -> actor update -> weight sync

Few tokens cause most of the loss of entropy, as in KL-Cov. Differences from GRPO:

- among tokens whose covariance of log-probability and advantage is between two bounds, a `fraction` of all tokens is
  drawn at random and excluded from the loss
- the clip is wide, so that these exclusions take its place: ratios up to 2, and up to 10 where the advantage is below 0
- every token has the same weight, whatever the length of its response

The defaults are of the authors' script recipe/dapo/7b_clip_cov.sh, github.com/PRIME-RL/Entropy-Mechanism-of-RL.
"""

from functools import partial

from pydantic import Field, PositiveInt

from verl_mg.algorithms.advantages import group_relative, moments
from verl_mg.algorithms.aggregation import LossAggregation
from verl_mg.algorithms.losses import (
    clip_cov_loss,
    covariances,
    priorities,
    share_count,
    tokens_at_least,
    tokens_between,
)
from verl_mg.config import RecipeConfig
from verl_mg.job.job import RunningJob
from verl_mg.recipes.common.entropy import add_entropy_bonus
from verl_mg.recipes.common.kl import KLConfig, adapt_kl, add_kl_loss, kl_sums, rewards_with_kl, with_current_kl
from verl_mg.recipes.common.off_policy import OffPolicyConfig, add_off_policy_weights, apply_off_policy_weights
from verl_mg.recipes.common.old_logprobs import OldLogprobsInUse
from verl_mg.training.loss_inputs import LossInputs, LossOutput


class Config(RecipeConfig):
    prompts_per_iteration: PositiveInt = 64
    """Number of prompts that are trained on in an iteration."""
    group_size: int = Field(8, ge=2)
    """Number of responses to each prompt."""
    fraction: float = Field(2e-4, gt=0, le=1)
    """Share of the tokens of an iteration that is excluded."""
    covariance_low: float = 1.0
    """Lower bound of the covariance of the tokens that are drawn from."""
    covariance_high: float = 5.0
    """Upper bound of the covariance of the tokens that are drawn from."""
    clip_low: float = Field(1.0, gt=0)
    """Distance of the lower bound of the ratio from 1."""
    clip_high: float = Field(1.0, gt=0)
    """Distance of the upper bound of the ratio from 1."""
    dual_clip: float | None = Field(10.0, gt=1)
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
    old_logprobs: OldLogprobsInUse = "recompute"
    """Log-probs of the policy before its update: computed by the actor, or taken from the rollout."""


def roles(cfg: Config) -> set[str]:
    return {"actor", "rollout", "reward"} | ({"reference"} if cfg.kl.enabled else set())


def policy_loss(inputs: LossInputs, cfg: Config) -> LossOutput:
    columns = (inputs.old_logprobs, inputs.advantages, inputs.mask, inputs["cut"])
    loss = clip_cov_loss(inputs.logprobs, *columns, cfg.clip_low, cfg.clip_high, cfg.dual_clip)
    loss = apply_off_policy_weights(loss, inputs, cfg.off_policy)
    loss = add_entropy_bonus(loss, inputs, cfg.entropy_coefficient)
    return add_kl_loss(loss, inputs, cfg.kl)


def iteration(job: RunningJob, cfg: Config) -> dict[str, float]:
    cfg = with_current_kl(cfg, job.state)
    prompts = job.prompts.next_batch(cfg.prompts_per_iteration)
    batch = job.rollout.generate(prompts, num_samples=cfg.group_size)  # responses are scored as they complete
    batch["reward"] = job.reward.wait(batch)

    with job.concurrent_roles():
        if cfg.old_logprobs == "recompute":
            batch["old_logprobs"] = job.actor.compute_logprobs(batch)
        else:
            batch["old_logprobs"] = batch["rollout_logprobs"]
        if cfg.kl.enabled:
            batch["ref_logprobs"] = job.reference.compute_logprobs(batch)
    add_off_policy_weights(batch, cfg.off_policy, job.all_reduce_sum)

    advantages = group_relative(rewards_with_kl(batch, cfg.kl), batch["group"], batch["trajectory"])
    batch["advantages"] = batch.expand_to_tokens(advantages) * batch["loss_mask"]
    mask = batch["loss_mask"]
    # Means and threshold are over all ranks, so that the choice does not depend on how rows are distributed.
    logprob_moments = job.all_reduce_sum(moments(batch["old_logprobs"], mask))
    advantage_moments = job.all_reduce_sum(moments(batch["advantages"], mask))
    covariance = covariances(batch["old_logprobs"], batch["advantages"], mask, logprob_moments, advantage_moments)
    num_selected = share_count(int(logprob_moments[0]), cfg.fraction)
    candidates = tokens_between(covariance, mask, cfg.covariance_low, cfg.covariance_high)
    # Random numbers by sample and position: the draw is the same however rows are distributed over ranks.
    priority = priorities(batch.expand_to_tokens(batch["sample_id"]), batch.positions, seed=job.iteration)
    threshold = job.global_kth_largest(priority[candidates], num_selected)
    batch["cut"] = tokens_at_least(priority, candidates, threshold)

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
