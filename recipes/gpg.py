"""GPG: group policy gradient (arXiv:2504.02546).

    prompts -> rollout -> reward -> old and reference log-probs -> advantages -> actor update -> weight sync

Differences from GRPO:

- the plain policy gradient, without ratio and clip, for one update in an iteration
- rewards are centred, not divided by the standard deviation; groups whose rewards are all equal have no gradient, so
  advantages are scaled up by all samples / samples of other groups
- every token has the same weight, whatever the length of its response
"""

from functools import partial

from pydantic import Field, PositiveInt

from verl_mg.algorithms.advantages import group_relative, informative
from verl_mg.algorithms.aggregation import LossAggregation
from verl_mg.algorithms.losses import gpg_loss
from verl_mg.config import RecipeConfig
from verl_mg.job.job import RunningJob
from verl_mg.recipes.common.entropy import add_entropy_bonus
from verl_mg.recipes.common.kl import KLConfig, adapt_kl, add_kl_loss, kl_sums, rewards_with_kl, with_current_kl
from verl_mg.recipes.common.off_policy import OffPolicyConfig, add_off_policy_weights, apply_off_policy_weights
from verl_mg.recipes.common.old_logprobs import OldLogprobs
from verl_mg.training.loss_inputs import LossInputs, LossOutput


class Config(RecipeConfig):
    prompts_per_iteration: PositiveInt = 64
    """Number of prompts that are trained on in an iteration."""
    group_size: int = Field(8, ge=2)
    """Number of responses to each prompt."""
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
    old_logprobs: OldLogprobs = "recompute"
    """Log-probs of the policy before its update: computed by the actor, or taken from the rollout, or not needed."""


def roles(cfg: Config) -> set[str]:
    return {"actor", "rollout", "reward"} | ({"reference"} if cfg.kl.enabled else set())


def policy_loss(inputs: LossInputs, cfg: Config) -> LossOutput:
    loss = gpg_loss(inputs.logprobs, inputs.advantages, inputs.mask)
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
        elif cfg.old_logprobs == "rollout":
            batch["old_logprobs"] = batch["rollout_logprobs"]
        if cfg.kl.enabled:
            batch["ref_logprobs"] = job.reference.compute_logprobs(batch)
    add_off_policy_weights(batch, cfg.off_policy, job.all_reduce_sum)

    rewards = rewards_with_kl(batch, cfg.kl)
    # Both numbers are over all ranks: the factor is the same however groups are distributed.
    useful = informative(rewards, batch["group"], batch["trajectory"])[batch.first_rows]
    num_samples, num_useful = job.all_reduce_sum([len(useful), useful.sum()]).tolist()
    advantages = group_relative(rewards, batch["group"], batch["trajectory"], normalize_by_std=False)
    advantages = advantages * (num_samples / max(num_useful, 1))
    batch["advantages"] = batch.expand_to_tokens(advantages) * batch["loss_mask"]

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
