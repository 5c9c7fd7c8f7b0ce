"""VAPO: value-based augmented PPO for long chains of thought (arXiv:2504.05118).

    prompts -> rollout -> reward -> log-probs, values -> advantages, returns -> critic and actor update -> weight sync

Differences from GRPO:

- PPO with a critic, as in ppo.py, which is trained before the policy (`critic_warmup`)
- lambda is 1 for the critic, and for the policy it grows with the length of the response
- DAPO's higher upper clip, and every token has the same weight
- a language-model loss on the responses with a reward above 0 is added
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import Field, PositiveInt

from verl_mg.algorithms.advantages import gae, length_adaptive_lambda, moments, whiten
from verl_mg.algorithms.aggregation import LossAggregation
from verl_mg.algorithms.losses import clipped_policy_loss, explained_variance, imitation_loss, value_loss
from verl_mg.config import RecipeConfig
from verl_mg.job.job import RunningJob
from verl_mg.recipes.common.entropy import add_entropy_bonus
from verl_mg.recipes.common.kl import KLConfig, adapt_kl, add_kl_loss, kl_sums, token_rewards_with_kl, with_current_kl
from verl_mg.recipes.common.off_policy import OffPolicyConfig, add_off_policy_weights, apply_off_policy_weights
from verl_mg.recipes.common.old_logprobs import OldLogprobs
from verl_mg.training.loss_inputs import LossInputs, LossOutput


class Config(RecipeConfig):
    prompts_per_iteration: PositiveInt = 64
    """Number of prompts that are trained on in an iteration."""
    group_size: int = Field(16, ge=1)
    """Number of responses to each prompt."""
    clip_low: float = Field(0.2, gt=0)
    """Distance of the lower bound of the ratio from 1."""
    clip_high: float = Field(0.28, gt=0)
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
    lam_alpha: float = Field(0.05, gt=0)
    """Constant alpha of the policy's lambda, 1 - 1 / (alpha * length of the response)."""
    critic_lam: float = Field(1.0, ge=0, le=1)
    """Lambda of the returns that the critic is trained on; 1 gives Monte Carlo returns."""
    critic_warmup: int = Field(50, ge=0)
    """Number of first iterations in which only the critic is trained."""
    value_clip: float | None = Field(0.5, gt=0)
    """Largest distance of a value from the one at the start of the iteration that has a gradient; null is unlimited."""
    imitation: float = Field(0.1, ge=0)
    """Weight of the language-model loss on right responses."""
    loss_aggregation: LossAggregation = "token-mean"
    """Reduction of the token losses of actor and critic to one number: averages over tokens or over responses."""
    num_minibatches: PositiveInt = 1
    """Number of optimizer steps in an epoch, each with an equal part of the samples."""
    num_epochs: PositiveInt = 1
    """Number of passes over the samples of an iteration."""
    old_logprobs: OldLogprobs = "recompute"
    """Log-probs of the policy before its update: computed by the actor, or taken from the rollout, or not needed."""


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
    policy, metrics = add_kl_loss(loss, inputs, cfg.kl)
    imitation, imitation_metrics = imitation_loss(inputs.logprobs, inputs["right"], inputs.mask)
    return policy + cfg.imitation * imitation, metrics | imitation_metrics


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
        batch["values"] = job.critic.compute_values(batch)
    add_off_policy_weights(batch, cfg.off_policy, job.all_reduce_sum)

    rewards, mask = token_rewards_with_kl(batch, cfg.kl)
    lam = length_adaptive_lambda(mask.sum(1), cfg.lam_alpha)
    values, _ = batch.pad("values")
    advantages, _ = gae(rewards, values, mask, cfg.gamma, lam)
    _, returns = gae(rewards, values, mask, cfg.gamma, cfg.critic_lam)
    batch["advantages"] = batch.unpad(whiten(advantages, mask, job.all_reduce_sum(moments(advantages, mask))))
    batch["returns"] = batch.unpad(returns)

    # Weights of right tokens: their mean over all tokens, or over all responses, is the mean over the right ones.
    right = batch["reward"] > 0
    counted = mask if cfg.loss_aggregation == "token-mean" else mask.any(1, keepdim=True)
    num_right = (counted & right[batch.first_rows][:, None]).sum()
    total, num_right = job.all_reduce_sum([counted.sum(), num_right]).tolist()
    batch["right"] = (batch["loss_mask"] & batch.expand_to_tokens(right)).float() * (total / max(num_right, 1))

    # The head of a new critic predicts nothing yet: advantages from its values would be noise.
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
