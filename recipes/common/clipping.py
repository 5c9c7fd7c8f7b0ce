"""PPO's clipped surrogate (arXiv:1707.06347, equation 7), which many recipes train the policy with."""

from pydantic import Field
from torch import Tensor

from recipes.common import sampling
from recipes.common.penalties import regularized
from verl_mg.algorithms.losses import clipped_policy_loss
from verl_mg.megatron.microbatch import LossInputs


class Config(sampling.Config):
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)


def policy_loss(tokens: LossInputs, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    old, advantages = tokens["old_logprobs"], tokens["advantages"]
    loss = clipped_policy_loss(tokens.logprobs, old, advantages, tokens.mask, cfg.clip_low, cfg.clip_high)
    return regularized(loss, tokens, cfg)
