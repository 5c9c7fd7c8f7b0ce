"""KL-Cov: a KL penalty on the few tokens that reduce the entropy most (arXiv:2505.22617).

    prompts -> rollout -> reward -> old and reference log-probs -> advantages -> actor update -> weight sync

The entropy of the policy falls with the covariance of log-probability and advantage, and few tokens cause most of
it.
Differences from GRPO:

- the `fraction` of all tokens with the highest covariance gets a penalty on its distance from the old policy
- no clip of the ratio
- every token has the same weight, whatever the length of its response
"""

from functools import partial

from pydantic import Field, PositiveInt

from verl_mg.algorithms.advantages import group_relative, moments
from verl_mg.algorithms.aggregation import LossAggregation
from verl_mg.algorithms.losses import covariances, kl_cov_loss, share_count, tokens_at_least
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
    fraction: float = Field(2e-3, gt=0, le=1)
    """Share of the tokens of an iteration that is penalised."""
    penalty: float = Field(1.0, ge=0)
    """Weight of the penalty on these tokens, in loss per nat."""
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
    loss = kl_cov_loss(
        inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.mask, inputs["penalized"], cfg.penalty
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
    threshold = job.global_kth_largest(covariance[mask], num_selected)
    batch["penalized"] = tokens_at_least(covariance, mask, threshold)

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
