"""ReMax: REINFORCE with the reward of the greedy response as baseline (arXiv:2310.10505).

    prompts -> rollout -> reward -> log-probs -> greedy rollout, reward -> advantages -> actor update -> weight sync

Differences from GRPO:

- no groups: for each prompt the most probable response is generated too, and its reward is the baseline
- no division by a standard deviation; token losses are summed over a response
- a KL penalty, if set, is subtracted from the reward
"""

from functools import partial

from pydantic import Field, PositiveInt

from verl_mg.algorithms.advantages import remax
from verl_mg.algorithms.aggregation import LossAggregation
from verl_mg.algorithms.losses import clipped_policy_loss
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
    group_size: int = Field(1, ge=1)
    """Number of responses to each prompt."""
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
    loss_aggregation: LossAggregation = "seq-mean-token-sum"
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
        if cfg.old_logprobs == "recompute":
            batch["old_logprobs"] = job.actor.compute_logprobs(batch)
        elif cfg.old_logprobs == "rollout":
            batch["old_logprobs"] = batch["rollout_logprobs"]
        if cfg.kl.enabled:
            batch["ref_logprobs"] = job.reference.compute_logprobs(batch)
    add_off_policy_weights(batch, cfg.off_policy, job.all_reduce_sum)

    # A greedy response may be on another rank than the rows that it is compared with: both are matched by prompt, and
    # by agent. An agent without a turn in the greedy episode has the baseline 0.
    ids = ("prompt_id", "agent") if job.config.rollout.agent_names else ("prompt_id",)
    prompt_ids = job.all_gather_column(batch, "prompt_id").unique().tolist()
    greedy = job.rollout.generate_greedy([job.prompts.by_id(prompt_id) for prompt_id in prompt_ids])
    greedy["reward"] = job.reward.wait(greedy)
    greedy_ids = zip(*(job.all_gather_column(greedy, name).tolist() for name in ids), strict=True)
    baselines = dict(zip(greedy_ids, job.all_gather_column(greedy, "reward").tolist(), strict=True))

    keys = zip(*(batch[name].tolist() for name in ids), strict=True)
    greedy_rewards = batch["reward"].new_tensor([baselines.get(key, 0.0) for key in keys])
    advantages = remax(rewards_with_kl(batch, cfg.kl), greedy_rewards)
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
