"""GRPO: group-relative policy optimisation (DeepSeekMath, arXiv:2402.03300).

Sample a group of responses to each prompt and push up the tokens of those that did better than their group's
mean. The KL term is off unless asked for; `normalize_std=false` with `aggregation=seq-mean-token-sum-norm` is
Dr.GRPO (arXiv:2503.20783). `oversampling` prompts more are asked than kept: the slowest are cut, and go on in the
next iteration with `rollout.partial=true`. `correction` weighs the tokens that the rollout engine and the trainer
judge differently: see verl_mg/algorithms/correction.py.
"""

from functools import partial
from typing import Literal

from pydantic import Field, PositiveInt
from torch import Tensor

from verl_mg.algorithms import kl
from verl_mg.algorithms.advantages import group_relative
from verl_mg.algorithms.correction import Correction, correct
from verl_mg.algorithms.losses import clipped_policy_loss
from verl_mg.batch import Batch
from verl_mg.config import Section
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossTokens


class Config(Section):
    prompts_per_iteration: PositiveInt = 64
    group_size: int = Field(8, ge=2)
    oversampling: int = Field(0, ge=0)
    minibatches: PositiveInt = 1
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    kl_coefficient: float = Field(0.0, ge=0)
    normalize_std: bool = True
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "seq-mean-token-mean"
    correction: Literal["none", Correction] = "none"
    correction_low: float = Field(0.5, ge=0, le=1)
    correction_high: float = Field(2.0, ge=1, allow_inf_nan=False)


def roles(cfg: Config) -> set[str]:
    return {"actor", "rollout", "reward"} | ({"reference"} if cfg.kl_coefficient else set())


def policy_loss(tokens: LossTokens, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    old, advantages = tokens["old_logprobs"], tokens["advantages"]
    loss, metrics = clipped_policy_loss(tokens.logprobs, old, advantages, tokens.mask, cfg.clip_low, cfg.clip_high)
    if cfg.correction != "none":
        loss = loss * tokens["correction"]
        metrics |= {name: tokens[name] for name in ("correction", "correction_below", "correction_above")}
    if cfg.kl_coefficient:
        divergence = kl.penalty(tokens.logprobs, tokens["ref_logprobs"], "k3")
        loss, metrics = loss + cfg.kl_coefficient * divergence, metrics | {"kl": divergence}
    return loss, metrics


def add_correction(batch: Batch, cfg: Config) -> None:
    old, rollout, bounds = batch["old_logprobs"], batch["rollout_logprobs"], (cfg.correction_low, cfg.correction_high)
    weights, outside = correct(cfg.correction, old, rollout, batch["loss_mask"], batch.sequence_ids, *bounds)
    for name, column in {"correction": weights, **outside}.items():
        batch[name] = column


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    prompts = job.prompts.take(cfg.prompts_per_iteration + cfg.oversampling - job.rollout.unfinished)
    batch = job.rollout.generate(prompts, samples=cfg.group_size, keep=cfg.prompts_per_iteration)
    batch["reward"] = job.reward(batch)
    batch["old_logprobs"] = job.actor.logprobs(batch)
    if cfg.correction != "none":
        add_correction(batch, cfg)
    if cfg.kl_coefficient:
        batch["ref_logprobs"] = job.reference.logprobs(batch)
    advantages = group_relative(batch["reward"], batch["group"], cfg.normalize_std)
    batch["advantages"] = batch.spread(advantages) * batch["loss_mask"]
    loss, length = partial(policy_loss, cfg=cfg), job.config.rollout.max_new_tokens
    metrics = job.actor.update(batch, loss, cfg.aggregation, minibatches=cfg.minibatches, max_length=length)
    job.rollout.sync(job.actor)
    return metrics
