"""GKD: generalized knowledge distillation (arXiv:2306.13649), with the divergences of MiniLLM and DistiLLM too.

    prompts -> rollout -> reward -> hidden states or likeliest tokens of the teacher -> actor update -> weight sync

`reference.path` is the teacher, or `teachers` has several, each for some sources of the data. Differences from GRPO:

- the loss of a token is the divergence of the student's whole distribution from the teacher's, not an estimate from the
  token that was sampled: no advantages, no ratios, and the reward is only reported
- a share of the iterations can train on given answers instead of the student's samples
"""

from collections.abc import Mapping

from pydantic import Field, PositiveInt

from verl_mg.algorithms.aggregation import LossAggregation
from verl_mg.algorithms.divergence import Divergence
from verl_mg.config import RecipeConfig
from verl_mg.job.job import RunningJob
from verl_mg.recipes.common.rows import is_turn_of_data
from verl_mg.training.loss_inputs import LossInputs, LossOutput


class Config(RecipeConfig):
    prompts_per_iteration: PositiveInt = 64
    """Number of prompts that are trained on in an iteration."""
    group_size: int = Field(1, ge=1)
    """Number of responses to each prompt."""
    divergence: Divergence = Divergence()
    """Divergence from the teacher that is the loss of a token."""
    data_fraction: float = Field(0.0, ge=0, le=1)
    """Share of the iterations that train on the answers of the data in place of samples: 1 - lambda of the paper."""
    loss_aggregation: LossAggregation = "token-mean"
    """Reduction of the token losses to one number: averages over tokens or over responses."""
    num_minibatches: PositiveInt = 1
    """Number of optimizer steps in an iteration, each with an equal part of the samples."""


def roles(cfg: Config) -> set[str]:
    return {"actor", "teachers"} | ({"rollout", "reward"} if cfg.data_fraction < 1 else set())


def divergence_loss(inputs: LossInputs) -> LossOutput:
    return inputs.divergence, {"divergence": inputs.divergence}


def iteration(job: RunningJob, cfg: Config) -> Mapping[str, float]:
    prompts = job.prompts.next_batch(cfg.prompts_per_iteration)
    if is_turn_of_data(job.iteration, cfg.data_fraction, job.config.rollout.mode):
        batch = job.sft_batch(prompts)
    else:
        batch = job.rollout.generate(prompts, num_samples=cfg.group_size)  # responses are scored as they complete
        batch["reward"] = job.reward.wait(batch)

    with job.concurrent_roles():
        job.teachers.score(batch, cfg.divergence)

    metrics = job.actor.update(
        batch,
        divergence_loss,
        cfg.loss_aggregation,
        num_minibatches=cfg.num_minibatches,
        max_length=job.config.rollout.max_new_tokens,
        teacher=job.teachers.comparison(cfg.divergence),
    )
    if cfg.data_fraction < 1:  # else there is no rollout
        job.rollout.update_weights(job.actor)
    return metrics
