"""PF-PPO: policy filtration in PPO (arXiv:2409.06957).

    prompts -> rollout -> reward -> log-probs -> resample -> values -> advantages -> critic, actor update -> weight sync

Differences from GRPO, besides a critic as in ppo.py:

- a buffer of the newest responses, from which reliable scores, high or low, are drawn with replacement
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from verl_mg.algorithms.advantages import gae, moments, resampling_weights, select, whiten
from verl_mg.algorithms.aggregation import LossAggregation
from verl_mg.algorithms.losses import clipped_policy_loss, explained_variance, value_loss
from verl_mg.batch import Batch
from verl_mg.config import RecipeConfig
from verl_mg.engines.trajectory import without_agent
from verl_mg.job.job import RunningJob
from verl_mg.recipes.common.entropy import add_entropy_bonus
from verl_mg.recipes.common.kl import KLConfig, adapt_kl, add_kl_loss, kl_sums, token_rewards_with_kl, with_current_kl
from verl_mg.recipes.common.off_policy import OffPolicyConfig, add_off_policy_weights, apply_off_policy_weights
from verl_mg.recipes.common.rows import concat_rollouts, oldest_of_newest
from verl_mg.training.loss_inputs import LossInputs, LossOutput


class Config(RecipeConfig):
    prompts_per_iteration: PositiveInt = 64
    """Number of prompts that are trained on in an iteration."""
    group_size: int = Field(4, ge=1)
    """Number of responses to each prompt."""
    buffer_samples: PositiveInt = 512
    """Number of newest responses that are drawn from, this iteration's included, in whole groups."""
    draws_per_prompt: PositiveInt | None = None
    """Responses drawn for each prompt of an iteration, on average; null draws as many as are sampled."""
    resampling: Literal["best_random", "best_worst", "pow", "max_min", "max_random"] = "max_min"
    """Weights of responses: best of a prompt and others, or and the worst; a power of the reward's magnitude; best and
    worst of all, or best of all preferred."""
    filter_probability: float = Field(0.5, ge=0, le=1)
    """Probability that a draw of `best_random` or `best_worst` takes the best response of its prompt."""
    power: float = Field(2.0, ge=0)
    """Exponent of `resampling: pow`."""
    clip_low: float = Field(0.2, gt=0)
    """Distance of the lower bound of the ratio from 1."""
    clip_high: float = Field(0.2, gt=0)
    """Distance of the upper bound of the ratio from 1."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the ratio where the advantage is below 0; null sets no bound."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy of each token's distribution, which is subtracted from the loss."""
    kl: KLConfig = KLConfig(placement="reward", estimator="k1")
    """Penalty on the divergence from the reference policy."""
    off_policy: OffPolicyConfig = OffPolicyConfig()
    """Correction of the difference between rollout engine and trainer."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount from one token to the next."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda of the generalized advantage estimation for the policy."""
    critic_lam: float = Field(1.0, ge=0, le=1)
    """Lambda of the returns that the critic is trained on; 1 gives Monte Carlo returns."""
    critic_warmup: int = Field(0, ge=0)
    """Number of first iterations in which only the critic is trained."""
    value_clip: float | None = Field(0.5, gt=0)
    """Largest distance of a value from the one at the start of the iteration that has a gradient; null is unlimited."""
    loss_aggregation: LossAggregation = "token-mean"
    """Reduction of the token losses of actor and critic to one number: averages over tokens or over responses."""
    num_minibatches: PositiveInt = 1
    """Number of optimizer steps in an epoch, each with an equal part of the samples."""
    num_epochs: PositiveInt = 1
    """Number of passes over the samples of an iteration."""

    @model_validator(mode="after")
    def _check_buffer(self) -> Self:
        if self.buffer_samples < self.group_size:
            raise ValueError(f"buffer_samples {self.buffer_samples} is less than a group. Write group_size or more")
        return self


def roles(cfg: Config) -> set[str]:
    return {"actor", "critic", "rollout", "reward"} | ({"reference"} if cfg.kl.enabled else set())


def critic_loss(inputs: LossInputs, cfg: Config) -> LossOutput:
    return value_loss(inputs.values, inputs["values"], inputs["returns"], inputs.mask, cfg.value_clip)


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
        batch["old_logprobs"] = job.actor.compute_logprobs(batch)
        if cfg.kl.enabled:
            batch["ref_logprobs"] = job.reference.compute_logprobs(batch)
    add_off_policy_weights(batch, cfg.off_policy, job.all_reduce_sum)

    # Buffer: every rank keeps its rows of the newest groups.
    earlier = job.state.get("response_buffer")
    buffer = concat_rollouts([earlier, batch] if isinstance(earlier, Batch) else [batch])
    groups = without_agent(job.all_gather_column(buffer.one_per_trajectory(), "group"))
    oldest = oldest_of_newest(groups, cfg.buffer_samples)
    job.state["response_buffer"] = buffer = buffer.select(without_agent(buffer["group"]) >= oldest)

    # All ranks draw the same responses, and each repeats its rows as often as they were drawn.
    names = ("trajectory", "group", "reward")
    drawable, groups, rewards = (job.all_gather_column(buffer.one_per_trajectory(), name) for name in names)
    num_samples = int(job.all_reduce_sum([len(batch.first_rows)]))
    num_draws = num_samples * (cfg.draws_per_prompt or cfg.group_size) // cfg.group_size
    weights = resampling_weights(rewards, groups, cfg.resampling, cfg.power, cfg.filter_probability)
    drawn = select(weights, num_draws, job.config.job.seed + job.iteration)
    times = dict(zip(drawable.tolist(), drawn.bincount(minlength=len(drawable)).tolist(), strict=True))
    batch = job.reassign_sample_ids(buffer.repeat([times[sample] for sample in buffer["trajectory"].tolist()]))

    batch["values"] = job.critic.compute_values(batch)
    rewards, mask = token_rewards_with_kl(batch, cfg.kl)
    values, _ = batch.pad("values")
    advantages, _ = gae(rewards, values, mask, cfg.gamma, cfg.lam)
    batch["advantages"] = batch.unpad(whiten(advantages, mask, job.all_reduce_sum(moments(advantages, mask))))
    batch["returns"] = batch.unpad(gae(rewards, values, mask, cfg.gamma, cfg.critic_lam)[1])

    train_actor = job.iteration > cfg.critic_warmup
    steps: dict[str, Any] = {"num_minibatches": cfg.num_minibatches, "num_epochs": cfg.num_epochs}
    steps |= {"max_length": job.config.rollout.max_new_tokens}
    actor_metrics: Mapping[str, float] = {}
    with job.concurrent_roles():
        critic_metrics = job.critic.update(batch, partial(critic_loss, cfg=cfg), cfg.loss_aggregation, **steps)
        if train_actor:
            actor_metrics = job.actor.update(batch, partial(policy_loss, cfg=cfg), cfg.loss_aggregation, **steps)
    metrics = {**critic_metrics, "critic/explained_variance": explained_variance(critic_metrics, prefix="critic/")}
    if train_actor:
        job.rollout.update_weights(job.actor)
        if cfg.kl.enabled:
            metrics |= adapt_kl(cfg.kl, job.all_reduce_sum(kl_sums(batch)), job.state)
    return {**metrics, **actor_metrics}
