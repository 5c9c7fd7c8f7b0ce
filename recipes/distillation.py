"""On-policy distillation (GKD, arXiv:2306.13649, with the reverse KL).

The student writes, the teacher judges each token: what it finds likelier than the student did is pushed up. The
reward takes no part; it tells how well the student does. `reference.path` is the teacher.
"""

from pydantic import Field

from recipes import cispo
from recipes.cispo import policy_loss
from recipes.common import sampling
from recipes.common.penalties import steered
from recipes.common.sampling import learn, sample
from verl_mg.algorithms.advantages import distillation_advantages
from verl_mg.job.job import Job

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(cispo.Config):
    group_size: int = Field(1, ge=1)
    clip_high: float = Field(4.0, gt=0)


def roles(cfg: Config) -> set[str]:
    return sampling.roles(cfg) | {"reference"}


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    teacher, mask = job.reference.compute_logprobs(batch), batch["loss_mask"]
    batch["advantages"] = distillation_advantages(batch["old_logprobs"], teacher, mask)
    total = job.all_reduce_sum(-batch["advantages"].sum()) / job.all_reduce_sum(mask.sum())
    return {"distillation/reverse_kl": float(total)} | learn(job, cfg, batch, policy_loss)
