"""GSPO: group sequence policy optimisation (Qwen, arXiv:2507.18071).

The ratio that is clipped is that of the whole response, the geometric mean over its tokens, as the reward is of the
whole response. It is close to 1, so the clip is three orders tighter than GRPO's.
"""

from pydantic import Field
from torch import Tensor

from recipes.common import sampling
from recipes.common.penalties import regularized, scores, steered
from recipes.common.sampling import learn, roles, sample
from verl_mg.algorithms.advantages import group_relative
from verl_mg.algorithms.losses import gspo_loss
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossInputs

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(sampling.Config):
    group_size: int = Field(8, ge=2)
    clip_low: float = Field(3e-4, gt=0)
    clip_high: float = Field(4e-4, gt=0)


def policy_loss(tokens: LossInputs, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    old, advantages, clips = tokens["old_logprobs"], tokens["advantages"], (cfg.clip_low, cfg.clip_high)
    loss = gspo_loss(tokens.logprobs, old, advantages, tokens.mask, tokens.sequence_ids, *clips)
    return regularized(loss, tokens, cfg)


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    batch["advantages"] = (
        batch.expand_to_tokens(group_relative(scores(batch, cfg), batch["group"])) * batch["loss_mask"]
    )
    return learn(job, cfg, batch, policy_loss, "seq-mean-token-mean")
