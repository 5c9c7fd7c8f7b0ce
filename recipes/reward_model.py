"""A reward model from preferences (Bradley-Terry, arXiv:2203.02155, equation 1).

A score at the last token of prompt and answer, higher for the answer that people preferred. It is saved as a sequence
classifier that `transformers` and verl_mg.rewards.classifier read.
"""

from collections.abc import Mapping

from pydantic import PositiveInt
from torch import Tensor

from verl_mg.algorithms.losses import bradley_terry_loss
from verl_mg.config import RecipeConfig
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossInputs


class Config(RecipeConfig):
    pairs_per_iteration: PositiveInt = 64


def roles(cfg: Config) -> set[str]:
    return {"reward_model"}


def ranking_loss(tokens: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    return bradley_terry_loss(tokens.values, tokens.mask, tokens["pair"], tokens["chosen"])


def iteration(job: Job, cfg: Config) -> Mapping[str, float]:
    batch = job.preference_batch(job.prompts.next_batch(cfg.pairs_per_iteration))
    batch["loss_mask"] = batch.last
    return job.reward_model.update(batch, ranking_loss, "seq-mean-token-mean")
