"""On-policy distillation (GKD, arXiv:2306.13649, with the reverse KL).

    prompts -> rollout -> reward -> log-probs of student and teacher -> advantages -> actor update -> weight sync

`reference.path` is the teacher, or `teachers` has several, each for some sources of the data. Differences from GRPO:

- the advantage of a token is the log-ratio of teacher to student: tokens that the teacher finds more likely than the
  student become more likely; the reward is only reported, and no groups are needed
- the loss is CISPO's, with weights up to 5, and every token has the same weight
"""

from functools import partial

from pydantic import Field, PositiveInt

from verl_mg.algorithms.advantages import distillation_advantages
from verl_mg.algorithms.aggregation import LossAggregation
from verl_mg.algorithms.losses import cispo_loss
from verl_mg.config import RecipeConfig
from verl_mg.job.job import RunningJob
from verl_mg.recipes.common.entropy import add_entropy_bonus
from verl_mg.recipes.common.kl import KLConfig, adapt_kl, add_kl_loss, kl_sums, with_current_kl
from verl_mg.recipes.common.off_policy import OffPolicyConfig, add_off_policy_weights, apply_off_policy_weights
from verl_mg.recipes.common.old_logprobs import OldLogprobsInUse
from verl_mg.training.loss_inputs import LossInputs, LossOutput


class Config(RecipeConfig):
    prompts_per_iteration: PositiveInt = 64
    """Number of prompts that are trained on in an iteration."""
    group_size: int = Field(1, ge=1)
    """Number of responses to each prompt."""
    clip_low: float = Field(1.0, gt=0, le=1)
    """Distance of the lower bound of the importance weight from 1."""
    clip_high: float = Field(4.0, gt=0)
    """Distance of the upper bound of the importance weight from 1."""
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
    return {"actor", "teachers", "rollout", "reward"} | ({"reference"} if cfg.kl.enabled else set())


def policy_loss(inputs: LossInputs, cfg: Config) -> LossOutput:
    loss = cispo_loss(inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.mask, cfg.clip_low, cfg.clip_high)
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
        batch["teacher_logprobs"] = job.teachers.compute_logprobs(batch)
        if cfg.kl.enabled:
            batch["ref_logprobs"] = job.reference.compute_logprobs(batch)
    add_off_policy_weights(batch, cfg.off_policy, job.all_reduce_sum)

    mask = batch["loss_mask"]
    spans = job.teachers.spans(batch)  # pieces of text, with a teacher of another tokenizer
    batch["advantages"] = distillation_advantages(batch["old_logprobs"], batch["teacher_logprobs"], mask, spans)
    num_tokens = job.all_reduce_sum(mask.sum()).clamp(min=1)
    reverse_kl = job.all_reduce_sum(-batch["advantages"].sum()) / num_tokens

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
    return {"distillation/reverse_kl": float(reverse_kl), **metrics, **kl_metrics}
