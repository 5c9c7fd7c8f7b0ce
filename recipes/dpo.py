"""DPO: direct preference optimisation (arXiv:2305.18290).

Of two answers the policy is to find the preferred one likelier than the reference does, and the other less likely:
no reward model, no sampling. `kind` "ipo" is IPO (arXiv:2310.12036), "hinge" RSO's loss (arXiv:2309.06657).
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal

from pydantic import Field, PositiveInt
from torch import Tensor

from verl_mg.algorithms.losses import dpo_loss
from verl_mg.config import RecipeConfig
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossInputs


class Config(RecipeConfig):
    pairs_per_iteration: PositiveInt = 64
    beta: float = Field(0.1, gt=0)
    kind: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)


def roles(cfg: Config) -> set[str]:
    return {"actor", "reference"}


def preference_loss(tokens: LossInputs, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    columns = (tokens["ref_logprobs"], tokens.mask, tokens["pair"], tokens["chosen"])
    return dpo_loss(tokens.logprobs, *columns, cfg.beta, cfg.label_smoothing, cfg.kind)


def iteration(job: Job, cfg: Config) -> Mapping[str, float]:
    batch = job.preference_batch(job.prompts.next_batch(cfg.pairs_per_iteration))
    batch["ref_logprobs"] = job.reference.compute_logprobs(batch)
    return job.actor.update(batch, partial(preference_loss, cfg=cfg), "seq-mean-token-mean")
