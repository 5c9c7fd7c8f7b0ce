"""REINFORCE with the mean reward of all responses as baseline (Williams 1992, arXiv:2402.14740).

    prompts -> rollout -> reward -> advantages -> actor update -> weight sync

Differences from GRPO: no groups, ratios, clips and reference; the plain policy gradient, one update in an iteration,
and token losses summed over a response. The shortest recipe: read it first.
"""

from pydantic import PositiveInt

from verl_mg.algorithms.aggregation import LossAggregation
from verl_mg.algorithms.losses import gpg_loss
from verl_mg.config import RecipeConfig
from verl_mg.job.job import RunningJob
from verl_mg.training.loss_inputs import LossInputs, LossOutput


class Config(RecipeConfig):
    prompts_per_iteration: PositiveInt = 64
    """Number of prompts of an iteration, with one response to each."""
    loss_aggregation: LossAggregation = "seq-mean-token-sum"
    """Reduction of the token losses to one number: averages over tokens or over responses."""


def roles(cfg: Config) -> set[str]:
    return {"actor", "rollout", "reward"}


def reinforce_loss(inputs: LossInputs) -> LossOutput:
    return gpg_loss(inputs.logprobs, inputs.advantages, inputs.mask)


def iteration(job: RunningJob, cfg: Config) -> dict[str, float]:
    prompts = job.prompts.next_batch(cfg.prompts_per_iteration)
    batch = job.rollout.generate(prompts, num_samples=1)
    batch["reward"] = job.reward.wait(batch)
    rewards = batch["reward"][batch.first_rows]  # one of each response, which of an agent is several rows
    total, count = job.all_reduce_sum([rewards.sum(), len(rewards)]).tolist()
    batch["advantages"] = batch.expand_to_tokens(batch["reward"] - total / count) * batch["loss_mask"]
    longest = job.config.rollout.max_new_tokens
    metrics = job.actor.update(batch, reinforce_loss, cfg.loss_aggregation, max_length=longest)
    job.rollout.update_weights(job.actor)
    return dict(metrics)
