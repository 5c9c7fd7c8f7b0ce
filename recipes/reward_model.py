"""Reward model from preferences (Bradley-Terry, arXiv:2203.02155, equation 1).

    prompts with two answers -> reward model update

Differences from GRPO:

- no policy: the score at the last token of prompt and answer is trained to be higher for the preferred answer
- the model is saved as a sequence classifier that `transformers` and verl_mg.rewards.classifier read
"""

from collections.abc import Mapping

from pydantic import PositiveInt

from verl_mg.algorithms.losses import bradley_terry_loss
from verl_mg.config import RecipeConfig
from verl_mg.job.job import RunningJob
from verl_mg.training.loss_inputs import LossInputs, LossOutput


class Config(RecipeConfig):
    pairs_per_iteration: PositiveInt = 64
    """Number of pairs of answers of an optimizer step."""


def roles(cfg: Config) -> set[str]:
    return {"reward_model"}


def ranking_loss(inputs: LossInputs) -> LossOutput:
    return bradley_terry_loss(inputs.values, inputs.mask, inputs["pair"], inputs["chosen"])


def iteration(job: RunningJob, cfg: Config) -> Mapping[str, float]:
    prompts = job.prompts.next_batch(cfg.pairs_per_iteration)
    batch = job.preference_batch(prompts)
    batch["loss_mask"] = batch.last
    return job.reward_model.update(batch, ranking_loss, "seq-mean-token-mean")
