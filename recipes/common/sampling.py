"""What the recipes that sample have in common.

    cfg = steered(job, cfg)                       the KL coefficient of this iteration, where it is steered
    batch = sample(job, cfg)                      responses, their reward, what policy and reference say of them
    batch["advantages"] = ...                     the recipe's own
    return learn(job, cfg, batch, policy_loss)    updates of the policy, and its weights to the engines

The reference judges only where the KL penalty has a weight, see `penalties`.
`correction` weighs the tokens that rollout engine and trainer judge differently, see verl_mg/algorithms/correction.py.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field, PositiveInt

from recipes.common.penalties import KLConfig, Loss, steer
from verl_mg.algorithms.correction import Correction, correct
from verl_mg.batch import Batch
from verl_mg.job.job import Job
from verl_mg.monitor.rollout_metrics import mismatch_metrics


class Config(KLConfig):
    prompts_per_iteration: PositiveInt = 64
    group_size: PositiveInt = 8
    minibatches: PositiveInt = 1
    epochs: PositiveInt = 1
    correction: Literal["none", Correction] = "none"
    correction_low: float = Field(0.5, ge=0, le=1)
    correction_high: float = Field(2.0, ge=1, allow_inf_nan=False)


def roles(cfg: Config) -> set[str]:
    asked = {"reference"} if cfg.kl_coefficient else set()
    return asked | {"actor", "rollout", "reward"}


def sample(job: Job, cfg: Config) -> Batch:
    return judge(job, cfg, draw(job, cfg))


def draw(job: Job, cfg: Config) -> Batch:
    prompts = job.prompts.next_batch(cfg.prompts_per_iteration)
    batch = job.rollout.generate(prompts, num_samples=cfg.group_size)
    batch["reward"] = job.reward.wait(batch)
    return batch


def judge(job: Job, cfg: Config, batch: Batch) -> Batch:
    batch["old_logprobs"] = job.actor.compute_logprobs(batch)
    if cfg.kl_coefficient:
        batch["ref_logprobs"] = job.reference.compute_logprobs(batch)
    if cfg.correction != "none":
        add_correction(batch, cfg)
    return batch


def together(batches: Sequence[Batch]) -> Batch:
    """One batch of several rollouts, without the parts of the reward: one may have some that another lacks."""
    bare = [Batch(batch.lengths) for batch in batches]
    for batch, copy in zip(batches, bare, strict=True):
        for name in batch.names():
            if not name.startswith("reward."):
                copy.put(name, batch[name], batch.kind(name))
    return Batch.concat(bare)


def add_correction(batch: Batch, cfg: Config) -> None:
    old, rollout, bounds = batch["old_logprobs"], batch["rollout_logprobs"], (cfg.correction_low, cfg.correction_high)
    weights, outside = correct(cfg.correction, old, rollout, batch["loss_mask"], batch.sequence_ids, *bounds)
    for name, column in {"correction": weights, **outside}.items():
        batch[name] = column


def learn(
    job: Job, cfg: Config, batch: Batch, loss: Callable[..., Loss], aggregation: str = "token-mean"
) -> dict[str, float]:
    length = job.config.rollout.max_new_tokens
    steps: dict[str, Any] = {"num_minibatches": cfg.minibatches, "num_epochs": cfg.epochs, "max_length": length}
    metrics = job.actor.update(batch, partial(loss, cfg=cfg), aggregation, **steps)
    job.rollout.update_weights(job.actor)
    return {**metrics, **steer(job, cfg, batch), **mismatch_metrics([batch])}
