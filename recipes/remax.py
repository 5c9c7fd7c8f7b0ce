"""ReMax: REINFORCE with the greedy response's score as baseline (arXiv:2310.10505).

No critic and no group: one more response to each prompt, the most probable one, tells what was to be expected.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from recipes.common import clipping
from recipes.common.clipping import policy_loss
from recipes.common.penalties import scores, steered
from recipes.common.sampling import learn, roles, sample
from verl_mg.algorithms.advantages import remax
from verl_mg.batch import Batch
from verl_mg.job.job import Job

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(clipping.Config):
    group_size: int = Field(1, ge=1)
    kl_in: Literal["loss", "reward"] = "reward"
    kl_kind: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k1"


def greedy_scores(job: Job, batch: Batch) -> Tensor:
    """(n,): what the most probable response to each row's prompt scores, whichever rank wrote it."""
    asked = job.all_gather_column(batch, "prompt_id").unique().tolist()
    greedy = job.rollout.generate_greedy([job.prompts.by_id(prompt) for prompt in asked])
    greedy["reward"] = job.reward.wait(greedy)
    known = dict(
        zip(
            job.all_gather_column(greedy, "prompt_id").tolist(),
            job.all_gather_column(greedy, "reward").tolist(),
            strict=True,
        )
    )
    return torch.tensor([known[prompt] for prompt in batch["prompt_id"].tolist()])


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    advantages = remax(scores(batch, cfg), greedy_scores(job, batch))
    batch["advantages"] = batch.expand_to_tokens(advantages) * batch["loss_mask"]
    return learn(job, cfg, batch, policy_loss, "seq-mean-token-sum")
