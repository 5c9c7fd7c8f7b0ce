"""SAPO: soft adaptive policy optimisation (Qwen, arXiv:2511.20347).

A clip lets a token's gradient through or not. A soft gate turns it down as the ratio leaves 1, faster for tokens that
are to become less probable, whose updates spread over the whole vocabulary.
"""

from pydantic import Field
from torch import Tensor

from recipes.common import sampling
from recipes.common.penalties import regularized, scores, steered
from recipes.common.sampling import learn, roles, sample
from verl_mg.algorithms.advantages import group_relative
from verl_mg.algorithms.losses import sapo_loss
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossInputs

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(sampling.Config):
    group_size: int = Field(8, ge=2)
    tau_positive: float = Field(1.0, gt=0)
    tau_negative: float = Field(1.05, gt=0)


def policy_loss(tokens: LossInputs, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    old, advantages, taus = tokens["old_logprobs"], tokens["advantages"], (cfg.tau_positive, cfg.tau_negative)
    return regularized(sapo_loss(tokens.logprobs, old, advantages, tokens.mask, *taus), tokens, cfg)


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    batch["advantages"] = (
        batch.expand_to_tokens(group_relative(scores(batch, cfg), batch["group"])) * batch["loss_mask"]
    )
    return learn(job, cfg, batch, policy_loss, "seq-mean-token-mean")
