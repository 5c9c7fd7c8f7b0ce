"""Divergence from the reference, in the reward or in the loss, and the weights of a correction.

`kl_kind` names the estimator, see verl_mg/algorithms/kl.py. With `kl_target` the coefficient is steered towards so
many nats a token (arXiv:1909.08593, section 2.2).
"""

from typing import Any, Literal, TypeVar

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from verl_mg.algorithms import kl
from verl_mg.algorithms.advantages import moments, token_rewards
from verl_mg.algorithms.losses import Metrics
from verl_mg.batch import Batch
from verl_mg.config import RecipeConfig
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossInputs

Loss = tuple[Tensor, Metrics]


class KLConfig(RecipeConfig):
    kl_coefficient: float = Field(0.0, ge=0)
    kl_in: Literal["loss", "reward"] = "loss"
    kl_kind: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    kl_target: float | None = Field(None, gt=0)
    kl_horizon: PositiveInt = 10000


C = TypeVar("C", bound=KLConfig)


def token_scores(batch: Batch, cfg: KLConfig) -> tuple[Tensor, Tensor]:
    """(n, T) rewards and the (n, T) mask: the reward at the last token, less each token's penalty if in the reward."""
    mask, _ = batch.pad("loss_mask")
    rewards = token_rewards(batch["reward"], mask)
    if cfg.kl_coefficient and cfg.kl_in == "reward":
        old, reference = (batch.pad(name)[0] for name in ("old_logprobs", "ref_logprobs"))
        rewards = kl.in_reward(rewards, old, reference, mask, cfg.kl_coefficient, cfg.kl_kind)
    return rewards, mask


def scores(batch: Batch, cfg: KLConfig) -> Tensor:
    """(n,): the reward, less the penalties of all tokens if they are in the reward."""
    in_reward = cfg.kl_coefficient and cfg.kl_in == "reward"
    return token_scores(batch, cfg)[0].sum(1) if in_reward else batch["reward"]


def regularized(loss: Loss, tokens: LossInputs, cfg: Any) -> Loss:
    """Weighed by the correction, and with the penalty if that is in the loss."""
    values, metrics = loss
    if cfg.correction != "none":
        values = values * tokens["correction"]
        metrics = metrics | {name: tokens[name] for name in ("correction", "correction_below", "correction_above")}
    if cfg.kl_coefficient and cfg.kl_in == "loss":
        divergence = kl.penalty(tokens.logprobs, tokens["ref_logprobs"], cfg.kl_kind)
        values, metrics = values + cfg.kl_coefficient * divergence, metrics | {"kl": divergence}
    return values, metrics


def steered(job: Job, cfg: C) -> C:
    """The configuration with the coefficient of this iteration."""
    if not (cfg.kl_coefficient and cfg.kl_target):
        return cfg
    return cfg.model_copy(update={"kl_coefficient": job.state.get("kl_coefficient", cfg.kl_coefficient)})


def steer(job: Job, cfg: KLConfig, batch: Batch) -> dict[str, float]:
    """The divergence in this iteration and, where it has a target, from it the coefficient of the next."""
    if not cfg.kl_coefficient:
        return {}
    divergence = kl.penalty(batch["old_logprobs"], batch["ref_logprobs"], "k1")
    tokens, total, _ = job.all_reduce_sum(moments(divergence, batch["loss_mask"])).tolist()
    observed, rows = total / max(tokens, 1), int(job.all_reduce_sum(torch.tensor(len(batch))))
    if cfg.kl_target:
        job.state["kl_coefficient"] = kl.adapted(cfg.kl_coefficient, observed, cfg.kl_target, cfg.kl_horizon, rows)
    return {"kl/observed": observed, "kl/coefficient": cfg.kl_coefficient}
