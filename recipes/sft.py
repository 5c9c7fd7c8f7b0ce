"""Supervised fine-tuning: raise the log-probability of given answers, each token weighing the same."""

from collections.abc import Mapping

from pydantic import PositiveInt
from torch import Tensor

from verl_mg.algorithms.losses import sft_loss
from verl_mg.config import RecipeConfig
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossInputs


class Config(RecipeConfig):
    examples_per_iteration: PositiveInt = 64


def roles(cfg: Config) -> set[str]:
    return {"actor"}


def imitation_loss(tokens: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    return sft_loss(tokens.logprobs, tokens.mask)


def iteration(job: Job, cfg: Config) -> Mapping[str, float]:
    batch = job.sft_batch(job.prompts.next_batch(cfg.examples_per_iteration))
    return job.actor.update(batch, imitation_loss, "token-mean")
