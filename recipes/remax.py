"""ReMax: REINFORCE with the greedy response's score as baseline (arXiv:2310.10505).

No critic and no group: one more response to each prompt, the most probable one, tells what was to be expected.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from recipes.pieces import sampling
from recipes.pieces.penalties import regularized, scores, steered
from recipes.pieces.sampling import learn, roles, sample
from verl_mg.algorithms.advantages import remax
from verl_mg.algorithms.losses import clipped_policy_loss
from verl_mg.batch import Batch
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossTokens

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(sampling.Config):
    group_size: int = Field(1, ge=1)
    kl_in: Literal["loss", "reward"] = "reward"
    kl_kind: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k1"
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)


def policy_loss(tokens: LossTokens, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    old, advantages = tokens["old_logprobs"], tokens["advantages"]
    loss = clipped_policy_loss(tokens.logprobs, old, advantages, tokens.mask, cfg.clip_low, cfg.clip_high)
    return regularized(loss, tokens, cfg)


def greedy_scores(job: Job, batch: Batch) -> Tensor:
    """(n,): what the most probable response to each row's prompt scores, whichever rank wrote it."""
    asked = job.column(batch, "prompt_id").unique().tolist()
    greedy = job.rollout.greedy([job.prompts.by_id(prompt) for prompt in asked])
    greedy["reward"] = job.reward(greedy)
    known = dict(zip(job.column(greedy, "prompt_id").tolist(), job.column(greedy, "reward").tolist(), strict=True))
    return torch.tensor([known[prompt] for prompt in batch["prompt_id"].tolist()])


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    advantages = remax(scores(batch, cfg), greedy_scores(job, batch))
    batch["advantages"] = batch.spread(advantages) * batch["loss_mask"]
    return learn(job, cfg, batch, policy_loss, "seq-mean-token-sum")
