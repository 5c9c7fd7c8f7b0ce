"""SFT: supervised fine-tuning on given answers, with the same weight for every token (arXiv:2203.02155).

    prompts with answers -> actor update

Differences from GRPO:

- neither samples nor rewards: the loss is the negative log-likelihood of the answers of the data
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import PositiveInt

from verl_mg.algorithms.losses import sft_loss
from verl_mg.config import RecipeConfig
from verl_mg.job.job import RunningJob
from verl_mg.training.loss_inputs import LossInputs, LossOutput


class Config(RecipeConfig):
    examples_per_iteration: PositiveInt = 64
    """Number of examples of an optimizer step."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """Reduction of the token losses to one number: averages over tokens or over examples."""


def roles(cfg: Config) -> set[str]:
    return {"actor"}


def imitation_loss(inputs: LossInputs) -> LossOutput:
    return sft_loss(inputs.logprobs, inputs.mask)


def iteration(job: RunningJob, cfg: Config) -> Mapping[str, float]:
    prompts = job.prompts.next_batch(cfg.examples_per_iteration)
    batch = job.sft_batch(prompts)
    return job.actor.update(batch, imitation_loss, cfg.loss_aggregation)
