"""PRIME: process reinforcement through implicit rewards (arXiv:2502.01456).

A language model that is trained to tell right responses from wrong ones by `beta` times the log-ratio to its own
beginning is a reward model of single tokens. It learns online, from the outcomes of each iteration, before it judges.
"""

from functools import partial

from pydantic import Field
from torch import Tensor

from recipes.common import clipping, sampling
from recipes.common.clipping import policy_loss
from recipes.common.penalties import scores, steered
from recipes.common.sampling import learn, sample
from verl_mg.algorithms.advantages import implicit_rewards, prime_advantages
from verl_mg.algorithms.losses import prime_loss
from verl_mg.batch import Batch
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossInputs

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(clipping.Config):
    group_size: int = Field(4, ge=2)
    beta: float = Field(0.05, gt=0)
    gamma: float = Field(1.0, gt=0, le=1)


def roles(cfg: Config) -> set[str]:
    return sampling.roles(cfg) | {"process_reward", "reference"}


def outcome_loss(tokens: LossInputs, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    ids, right = tokens.sequence_ids, (tokens["reward"] > 0).float()
    return prime_loss(tokens.logprobs, tokens["ref_logprobs"], tokens.mask, ids, right, cfg.beta)


def process_rewards(job: Job, batch: Batch, cfg: Config) -> Tensor:
    """(n, T), by the model that has just learned from these outcomes."""
    batch["process_logprobs"] = job.process_reward.compute_logprobs(batch)
    new, reference, mask = (batch.pad(name)[0] for name in ("process_logprobs", "ref_logprobs", "loss_mask"))
    return implicit_rewards(new, reference, mask, cfg.beta)


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    batch["ref_logprobs"] = job.reference.compute_logprobs(batch)
    metrics = job.process_reward.update(batch, partial(outcome_loss, cfg=cfg), "seq-mean-token-mean")
    process, mask = process_rewards(job, batch, cfg), batch.pad("loss_mask")[0]
    batch["advantages"] = batch.unpad(prime_advantages(process, scores(batch, cfg), mask, batch["group"], cfg.gamma))
    return {**metrics, **learn(job, cfg, batch, policy_loss)}
