"""RLOO: REINFORCE leave-one-out (arXiv:2402.14740).

The baseline of a response is the mean score of the other responses to its prompt, which it has no part in: so the
gradient is unbiased. The KL penalty belongs to the score.
"""

from typing import Literal

from pydantic import Field

from recipes.common import clipping
from recipes.common.clipping import policy_loss
from recipes.common.penalties import scores, steered
from recipes.common.sampling import learn, roles, sample
from verl_mg.algorithms.advantages import rloo
from verl_mg.job.job import Job

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(clipping.Config):
    group_size: int = Field(4, ge=2)
    kl_in: Literal["loss", "reward"] = "reward"
    kl_kind: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k1"


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    batch["advantages"] = batch.expand_to_tokens(rloo(scores(batch, cfg), batch["group"])) * batch["loss_mask"]
    return learn(job, cfg, batch, policy_loss, "seq-mean-token-sum")
