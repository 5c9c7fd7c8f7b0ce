"""PPO with a critic (arXiv:1707.06347), as RLHF uses it (arXiv:2203.02155).

The critic predicts the return of each token; generalized advantage estimation weighs how much better it went. `lam`
is the policy's, `critic_lam` the critic's own: with both at 1 it is Monte Carlo, with another for each decoupled
(VC-PPO, arXiv:2503.01491). In the first `critic_warmup` iterations the critic learns alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

from pydantic import Field
from torch import Tensor

from recipes.common import clipping, sampling
from recipes.common.clipping import policy_loss
from recipes.common.penalties import Loss, steered, token_scores
from recipes.common.sampling import learn, sample
from verl_mg.algorithms.advantages import gae, moments, whiten
from verl_mg.algorithms.losses import explained_variance, value_loss
from verl_mg.batch import Batch
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossInputs

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(clipping.Config):
    group_size: int = Field(1, ge=1)
    kl_in: Literal["loss", "reward"] = "reward"
    kl_kind: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k1"
    gamma: float = Field(1.0, gt=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    critic_lam: float = Field(1.0, ge=0, le=1)
    critic_warmup: int = Field(0, ge=0)
    value_clip: float | None = Field(0.5, gt=0)


def roles(cfg: Config) -> set[str]:
    return sampling.roles(cfg) | {"critic"}


def critic_loss(tokens: LossInputs, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    return value_loss(tokens.values, tokens["values"], tokens["returns"], tokens.mask, cfg.value_clip)


def add_advantages(job: Job, batch: Batch, cfg: Config, lam: float | Tensor) -> None:
    """From the critic's values, with one lambda for the policy and one for the returns that the critic learns."""
    batch["values"] = job.critic.compute_values(batch)
    rewards, mask = token_scores(batch, cfg)
    values, _ = batch.pad("values")
    advantages, _ = gae(rewards, values, mask, cfg.gamma, lam)
    _, returns = gae(rewards, values, mask, cfg.gamma, cfg.critic_lam)
    batch["advantages"] = batch.unpad(whiten(advantages, mask, job.all_reduce_sum(moments(advantages, mask))))
    batch["returns"] = batch.unpad(returns)


def learn_both(job: Job, cfg: Config, batch: Batch, loss: Callable[..., Loss]) -> dict[str, float]:
    """Critic and, after the warm-up, policy; on ranks of their own at the same time."""
    steps = {"num_minibatches": cfg.minibatches, "num_epochs": cfg.epochs}
    of_critic = job.critic.update(batch, partial(critic_loss, cfg=cfg), "token-mean", **steps)
    of_actor = learn(job, cfg, batch, loss) if job.iteration > cfg.critic_warmup else {}
    means = {name.removeprefix("critic/"): value for name, value in of_critic.items()}
    return {**of_critic, "critic/explained_variance": explained_variance(means), **of_actor}


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    add_advantages(job, batch, cfg, cfg.lam)
    return learn_both(job, cfg, batch, policy_loss)
