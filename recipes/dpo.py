"""DPO: direct preference optimisation (arXiv:2305.18290).

    prompts with two answers -> reference log-probs -> actor update

Differences from GRPO:

- neither samples nor rewards: the data has a preferred and another answer to each prompt
- the policy learns to find the preferred answer more likely than the reference does, and the other one less likely; IPO
  (arXiv:2310.12036) and RSO's hinge loss (arXiv:2309.06657) are options
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal

from pydantic import Field, PositiveInt

from verl_mg.algorithms.losses import dpo_loss
from verl_mg.config import RecipeConfig
from verl_mg.job.job import RunningJob
from verl_mg.training.loss_inputs import LossInputs, LossOutput


class Config(RecipeConfig):
    pairs_per_iteration: PositiveInt = 64
    """Number of pairs of answers of an optimizer step."""
    beta: float = Field(0.1, gt=0)
    """Factor of the log-ratios to the reference; a lower one lets the policy depart further."""
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """Loss of a pair: that of DPO, of RSO, or of IPO."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed probability of a wrong preference, with `loss_type: sigmoid`."""


def roles(cfg: Config) -> set[str]:
    return {"actor", "reference"}


def preference_loss(inputs: LossInputs, cfg: Config) -> LossOutput:
    columns = (inputs.ref_logprobs, inputs.mask, inputs["pair"], inputs["chosen"])
    return dpo_loss(inputs.logprobs, *columns, cfg.beta, cfg.label_smoothing, cfg.loss_type)


def iteration(job: RunningJob, cfg: Config) -> Mapping[str, float]:
    prompts = job.prompts.next_batch(cfg.pairs_per_iteration)
    batch = job.preference_batch(prompts)
    batch["ref_logprobs"] = job.reference.compute_logprobs(batch)
    return job.actor.update(batch, partial(preference_loss, cfg=cfg), "seq-mean-token-mean")
