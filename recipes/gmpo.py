"""GMPO: geometric-mean policy optimisation (arXiv:2507.20673).

GRPO maximises the arithmetic mean of a response's weighted token ratios, in which one outlier counts for all. The
geometric mean hardly notices it, so the clip, of log-ratios, can be much wider.
"""

from pydantic import Field
from torch import Tensor

from recipes.common import sampling
from recipes.common.penalties import regularized, scores, steered
from recipes.common.sampling import learn, roles, sample
from verl_mg.algorithms.advantages import group_relative
from verl_mg.algorithms.losses import gmpo_loss
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossInputs

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(sampling.Config):
    group_size: int = Field(8, ge=2)
    clip_low: float = Field(0.4, gt=0)
    clip_high: float = Field(0.4, gt=0)


def policy_loss(tokens: LossInputs, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    old, advantages, clips = tokens["old_logprobs"], tokens["advantages"], (cfg.clip_low, cfg.clip_high)
    loss = gmpo_loss(tokens.logprobs, old, advantages, tokens.mask, tokens.sequence_ids, *clips)
    return regularized(loss, tokens, cfg)


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    batch["advantages"] = (
        batch.expand_to_tokens(group_relative(scores(batch, cfg), batch["group"])) * batch["loss_mask"]
    )
    return learn(job, cfg, batch, policy_loss, "seq-mean-token-mean")
