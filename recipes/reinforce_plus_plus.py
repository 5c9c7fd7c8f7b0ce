"""REINFORCE++ (arXiv:2501.03262).

No critic and no group: the return of each token, its KL penalties taken off, is whitened over the whole batch, and
that is its advantage. Clipped as in PPO.
"""

from typing import Literal

from pydantic import Field

from recipes.common import clipping
from recipes.common.clipping import policy_loss
from recipes.common.penalties import steered, token_scores
from recipes.common.sampling import learn, roles, sample
from verl_mg.algorithms.advantages import moments, reinforce_plus_plus, whiten
from verl_mg.job.job import Job

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(clipping.Config):
    group_size: int = Field(1, ge=1)
    kl_in: Literal["loss", "reward"] = "reward"
    kl_kind: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k1"
    gamma: float = Field(1.0, gt=0, le=1)


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    rewards, mask = token_scores(batch, cfg)
    returns = reinforce_plus_plus(rewards, mask, cfg.gamma)
    batch["advantages"] = batch.unpad(whiten(returns, mask, job.all_reduce_sum(moments(returns, mask))))
    return learn(job, cfg, batch, policy_loss)
