"""VAPO: value-based augmented PPO for long chains of thought (arXiv:2504.05118).

PPO with a critic that is trained before the policy moves (`critic_warmup`), lambda 1 for the critic and one that grows
with the response's length for the policy, DAPO's clip-higher and token mean, groups of responses, and a language-model
loss on the right ones, weighed by `imitation`.
"""

import torch
from pydantic import Field
from torch import Tensor

from recipes import ppo
from recipes.common.penalties import steered
from recipes.common.sampling import sample
from recipes.ppo import add_advantages, learn_both, roles
from verl_mg.algorithms.advantages import length_adaptive_lambda
from verl_mg.algorithms.losses import imitation_loss
from verl_mg.batch import Batch
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossInputs

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(ppo.Config):
    group_size: int = Field(16, ge=1)
    lam_alpha: float = Field(0.05, gt=0)
    critic_warmup: int = Field(50, ge=0)
    clip_high: float = Field(0.28, gt=0)
    imitation: float = Field(0.1, ge=0)


def policy_loss(tokens: LossInputs, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    loss, metrics = ppo.policy_loss(tokens, cfg)
    likeness, seen = imitation_loss(tokens.logprobs, tokens["right"], tokens.mask)
    return loss + cfg.imitation * likeness, metrics | seen


def add_right_tokens(job: Job, batch: Batch) -> None:
    """Weights whose mean over all tokens is the mean over those of responses with a reward above 0."""
    right = batch["loss_mask"] & batch.expand_to_tokens(batch["reward"] > 0)
    tokens, of_right = job.all_reduce_sum(torch.stack([batch["loss_mask"].sum(), right.sum()])).tolist()
    batch["right"] = right.float() * (tokens / max(of_right, 1))


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    lengths = batch.pad("loss_mask")[0].sum(1)
    add_advantages(job, batch, cfg, length_adaptive_lambda(lengths, cfg.lam_alpha))
    add_right_tokens(job, batch)
    return learn_both(job, cfg, batch, policy_loss)
