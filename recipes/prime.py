"""PRIME: process reinforcement through implicit rewards (arXiv:2502.01456).

    (prompts -> rollout -> reward) -> log-probs -> process_reward update -> advantages -> actor update -> weight sync

Differences from GRPO:

- tokens have process rewards: a language model is trained as a classifier of outcomes, whose logit is `beta` times the
  log-ratio to its initial weights, and the log-ratio of a single token is then a reward; the model is updated with the
  outcomes of an iteration before or after it gives the process rewards of the same iteration
- baselines leave the response itself out, and advantages are whitened only where `whiten` is set
- sampling is repeated until enough prompts have a mean outcome (the reward, limited to 0 and 1) within bounds
"""

from functools import partial
from typing import Literal

from pydantic import Field, PositiveInt

from verl_mg.algorithms.advantages import group_means, implicit_rewards, moments, prime_advantages, process_sums, whiten
from verl_mg.algorithms.aggregation import LossAggregation
from verl_mg.algorithms.losses import clipped_policy_loss, prime_loss
from verl_mg.batch import Batch
from verl_mg.config import RecipeConfig
from verl_mg.engines.trajectory import without_agent
from verl_mg.job.job import RunningJob
from verl_mg.recipes.common.entropy import add_entropy_bonus
from verl_mg.recipes.common.kl import KLConfig, adapt_kl, add_kl_loss, kl_sums, rewards_with_kl, with_current_kl
from verl_mg.recipes.common.off_policy import OffPolicyConfig, add_off_policy_weights, apply_off_policy_weights
from verl_mg.recipes.common.old_logprobs import OldLogprobs
from verl_mg.recipes.common.rows import concat_rollouts, rows_of_groups, sampling_metrics
from verl_mg.training.loss_inputs import LossInputs, LossOutput


class Config(RecipeConfig):
    prompts_per_iteration: PositiveInt = 64
    """Number of prompts that are trained on in an iteration."""
    group_size: int = Field(4, ge=2)
    """Number of responses to each prompt."""
    accuracy_low: float = Field(0.0, ge=0, le=1)
    """Smallest mean outcome of a prompt that is trained on."""
    accuracy_high: float = Field(1.0, ge=0, le=1)
    """Largest mean outcome of a prompt that is trained on."""
    max_sampling_rounds: PositiveInt | None = 10
    """Largest number of rollouts in an iteration to find `prompts_per_iteration` such prompts. null: no limit."""
    beta: float = Field(0.05, gt=0)
    """Factor of the log-ratio in the process rewards."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of process rewards from one token to the next."""
    process_weight: float = Field(1.0, ge=0)
    """Factor of the process rewards' part of the advantages."""
    bound_process: bool = False
    """Divides process rewards by the largest sum of them, from a token of a response on and without its sign."""
    whiten: bool = False
    """Gives the advantages of the tokens of an iteration mean 0 and standard deviation 1."""
    process_update: Literal["before", "after"] = "before"
    """Update of the process reward model, before or after it gives the process rewards of an iteration."""
    process_minibatches: PositiveInt = 1
    """Number of optimizer steps of the process reward model in an iteration."""
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
    old_logprobs: OldLogprobs = "recompute"
    """Log-probs of the policy before its update: computed by the actor, or taken from the rollout, or not needed."""


def roles(cfg: Config) -> set[str]:
    return {"actor", "reference", "process_reward", "rollout", "reward"}


def outcome_loss(inputs: LossInputs, cfg: Config) -> LossOutput:
    outcomes = inputs["reward"].clamp(0, 1)
    return prime_loss(inputs.logprobs, inputs.ref_logprobs, inputs.mask, inputs.sequence_ids, outcomes, cfg.beta)


def policy_loss(inputs: LossInputs, cfg: Config) -> LossOutput:
    loss = clipped_policy_loss(
        inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.mask, cfg.clip_low, cfg.clip_high, cfg.dual_clip
    )
    loss = apply_off_policy_weights(loss, inputs, cfg.off_policy)
    loss = add_entropy_bonus(loss, inputs, cfg.entropy_coefficient)
    return add_kl_loss(loss, inputs, cfg.kl)


def iteration(job: RunningJob, cfg: Config) -> dict[str, float]:
    cfg = with_current_kl(cfg, job.state)
    rounds, groups = list[Batch](), list[int]()
    while len(groups) < cfg.prompts_per_iteration and len(rounds) != cfg.max_sampling_rounds:
        prompts = job.prompts.next_batch(cfg.prompts_per_iteration)
        batch = job.rollout.generate(prompts, num_samples=cfg.group_size)
        batch["reward"] = job.reward.wait(batch)
        accuracy = group_means(batch["reward"].clamp(0, 1), batch["group"], batch["trajectory"])
        rounds.append(batch.select((accuracy >= cfg.accuracy_low) & (accuracy <= cfg.accuracy_high)))
        groups = without_agent(job.all_gather_column(concat_rollouts(rounds), "group")).unique().tolist()
    # The last round may bring more groups than an update needs. Every rank has all of them, and drops the same ones.
    groups = groups[: cfg.prompts_per_iteration]
    batch = rows_of_groups(concat_rollouts(rounds), groups)
    with job.concurrent_roles():
        if cfg.old_logprobs == "recompute":
            batch["old_logprobs"] = job.actor.compute_logprobs(batch)
        elif cfg.old_logprobs == "rollout":
            batch["old_logprobs"] = batch["rollout_logprobs"]
        batch["ref_logprobs"] = job.reference.compute_logprobs(batch)
    add_off_policy_weights(batch, cfg.off_policy, job.all_reduce_sum)
    # The log-probs before or after this update decide which weights give the process rewards.
    if cfg.process_update == "after":
        batch["process_logprobs"] = job.process_reward.compute_logprobs(batch)
    process_metrics = job.process_reward.update(
        batch, partial(outcome_loss, cfg=cfg), "seq-mean-token-mean", num_minibatches=cfg.process_minibatches
    )
    if cfg.process_update == "before":
        batch["process_logprobs"] = job.process_reward.compute_logprobs(batch)

    mask, logprobs, ref_logprobs = (batch.pad(name)[0] for name in ("loss_mask", "process_logprobs", "ref_logprobs"))
    process_rewards = implicit_rewards(logprobs, ref_logprobs, mask, cfg.beta)
    if cfg.bound_process:  # 1e-6 as in the published code: process rewards of an untrained model are 0
        process_rewards /= job.global_kth_largest(process_sums(process_rewards, mask).flatten(), 1) + 1e-6
    scores, of_group = (column[batch.first_rows] for column in (rewards_with_kl(batch, cfg.kl), batch["group"]))
    advantages = prime_advantages(process_rewards, scores, mask, of_group, cfg.gamma, cfg.process_weight)
    advantages = whiten(advantages, mask, job.all_reduce_sum(moments(advantages, mask))) if cfg.whiten else advantages
    batch["advantages"] = batch.unpad(advantages)
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
    kept = "a mean reward from accuracy_low to accuracy_high"
    sampled = sampling_metrics("prime", len(rounds), len(groups), cfg.prompts_per_iteration, kept, job.warn)
    return {**sampled, **process_metrics, **metrics, **kl_metrics}
