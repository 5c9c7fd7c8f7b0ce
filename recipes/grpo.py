"""GRPO: group-relative policy optimisation (DeepSeekMath, arXiv:2402.03300).

Sample a group of responses to each prompt and push up the tokens of those that did better than their group's mean.
The KL term is off unless asked for.
"""

from typing import Literal

from pydantic import Field

from recipes.common import clipping
from recipes.common.clipping import policy_loss
from recipes.common.penalties import scores, steered
from recipes.common.sampling import learn, roles, sample
from verl_mg.algorithms.advantages import group_relative
from verl_mg.job.job import Job

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(clipping.Config):
    group_size: int = Field(8, ge=2)
    normalize_std: bool = True
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "seq-mean-token-mean"


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    advantages = group_relative(scores(batch, cfg), batch["group"], cfg.normalize_std)
    batch["advantages"] = batch.expand_to_tokens(advantages) * batch["loss_mask"]
    return learn(job, cfg, batch, policy_loss, cfg.aggregation)
