"""DAPO: decoupled clip and dynamic sampling policy optimisation (arXiv:2503.14476).

    (prompts -> rollout -> reward) until enough groups differ -> log-probs -> advantages -> actor update -> weight sync

Differences from GRPO:

- the upper clip is higher, 0.28, so that unlikely tokens can become likely (section 3.1)
- sampling is repeated until enough groups have rewards that differ, since the others have no gradient (section 3.2)
- every token has the same weight, whatever the length of its response (section 3.3)
- the reward falls within the last `overlong_buffer` tokens before the limit, if that is set (section 3.4)
"""

from functools import partial
from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from verl_mg.algorithms.advantages import differ, group_relative, informative, soft_overlong_penalty
from verl_mg.algorithms.aggregation import LossAggregation, segment_totals
from verl_mg.algorithms.losses import clipped_policy_loss
from verl_mg.batch import Batch
from verl_mg.config import RecipeConfig
from verl_mg.engines.trajectory import without_agent
from verl_mg.job.job import RunningJob
from verl_mg.recipes.common.entropy import add_entropy_bonus
from verl_mg.recipes.common.kl import KLConfig, adapt_kl, add_kl_loss, kl_sums, rewards_with_kl, with_current_kl
from verl_mg.recipes.common.off_policy import OffPolicyConfig, add_off_policy_weights, apply_off_policy_weights
from verl_mg.recipes.common.old_logprobs import OldLogprobs
from verl_mg.recipes.common.rows import concat_rollouts, response_lengths, rows_of_groups, sampling_metrics
from verl_mg.training.loss_inputs import LossInputs, LossOutput


class Config(RecipeConfig):
    prompts_per_iteration: PositiveInt = 64
    """Number of prompts that are trained on in an iteration."""
    group_size: int = Field(16, ge=2)
    """Number of responses to each prompt."""
    dynamic_sampling: Literal["rounds", "streaming"] = "rounds"
    """Sampling until enough groups differ: in rollouts one after the other, or by replacing others as they complete."""
    max_sampling_rounds: PositiveInt | None = 10
    """Largest number of prompts in an iteration to find groups whose rewards differ, over `prompts_per_iteration`.
    null: no limit."""
    overlong_buffer: int = Field(0, ge=0)
    """Tokens before `rollout.max_new_tokens` in which the reward falls linearly by 1; 0 turns this off."""
    overlong_filter: bool = False
    """Excludes responses that are cut at `rollout.max_new_tokens` from the loss."""
    clip_low: float = Field(0.2, gt=0)
    """Distance of the lower bound of the ratio from 1."""
    clip_high: float = Field(0.28, gt=0)
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

    @model_validator(mode="after")
    def _check_rounds(self) -> Self:
        if self.dynamic_sampling == "streaming" and self.max_sampling_rounds is None:
            raise ValueError("max_sampling_rounds null needs dynamic_sampling=rounds. Write a number")
        return self


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
    rounds: list[Batch] = []
    groups: list[int] = []
    if cfg.dynamic_sampling == "streaming":  # a group whose rewards do not differ is replaced as soon as it is scored
        assert cfg.max_sampling_rounds is not None  # checked above: prompts are submitted in advance
        most = cfg.max_sampling_rounds * cfg.prompts_per_iteration
        batch = job.rollout.generate_filtered(cfg.prompts_per_iteration, cfg.group_size, differ, most)
        batch["reward"] = job.reward.wait(batch)
        # Of agents with names the rewards of one differ at least.
        rounds.append(batch.select(informative(batch["reward"], batch["group"], batch["trajectory"])))
        groups = without_agent(job.all_gather_column(rounds[0], "group")).unique().tolist()
    else:
        while len(groups) < cfg.prompts_per_iteration and len(rounds) != cfg.max_sampling_rounds:
            prompts = job.prompts.next_batch(cfg.prompts_per_iteration)
            batch = job.rollout.generate(prompts, num_samples=cfg.group_size)
            batch["reward"] = job.reward.wait(batch)
            rounds.append(batch.select(informative(batch["reward"], batch["group"], batch["trajectory"])))
            groups = without_agent(job.all_gather_column(concat_rollouts(rounds), "group")).unique().tolist()
    # The last round may bring more groups than an update needs. Every rank has all of them, and drops the same ones.
    groups = groups[: cfg.prompts_per_iteration]
    batch = rows_of_groups(concat_rollouts(rounds), groups)

    # After the filter, which compares the rewards without penalties of length.
    if cfg.overlong_buffer:
        limit = job.config.rollout.max_new_tokens
        penalty = soft_overlong_penalty(response_lengths(batch), limit, cfg.overlong_buffer)
        batch["reward"] = batch["reward"] + penalty
    if cfg.overlong_filter:
        truncated = segment_totals(batch["truncated"], batch["trajectory"]) > 0
        batch["loss_mask"] = batch["loss_mask"] & ~batch.expand_to_tokens(truncated)

    with job.concurrent_roles():
        if cfg.old_logprobs == "recompute":
            batch["old_logprobs"] = job.actor.compute_logprobs(batch)
        elif cfg.old_logprobs == "rollout":
            batch["old_logprobs"] = batch["rollout_logprobs"]
        if cfg.kl.enabled:
            batch["ref_logprobs"] = job.reference.compute_logprobs(batch)
    add_off_policy_weights(batch, cfg.off_policy, job.all_reduce_sum)

    advantages = group_relative(rewards_with_kl(batch, cfg.kl), batch["group"], batch["trajectory"])
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
    kept = "rewards that differ"
    sampled = sampling_metrics("dapo", len(rounds), len(groups), cfg.prompts_per_iteration, kept, job.warn)
    return {**sampled, **metrics, **kl_metrics}
