"""Values of keys of recipes with which a run is another one, and the outcome by which two runs are compared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as parquet
from pydantic import BaseModel

from tests.helpers.tiny_jobs import RECIPES, logged
from tests.recipes.tiny_runs import LETTERS
from verl_mg.config.keys import subsection
from verl_mg.job.recipe import load_recipe

NAMES = tuple(sorted(path.stem for path in RECIPES.glob("[!_]*.py")))


class Change(NamedTuple):
    """A value of a key, and what else the run has to have for the key to matter."""

    values: tuple[str, ...]  # the first that is not the default is taken
    others: tuple[str, ...] = ()


KL, CORRECTED = "algorithm.kl.coefficient=0.5", "algorithm.off_policy.correction=token-tis"
ADAPTED = (KL, "algorithm.kl.target=0.001", "algorithm.kl.horizon=8")
RISING = ("algorithm.kl.target=1e-9", "algorithm.kl.horizon=1000")
# Steps so large that ratios and values leave any bound.
SMALL, LARGE = "1e-6", "9.0"
CHANGES = {
    "prompts_per_iteration": Change(("4",)),
    "pairs_per_iteration": Change(("4",)),
    "examples_per_iteration": Change(("4",)),
    "group_size": Change(("2", "3")),
    "clip_low": Change((SMALL,)),
    "clip_high": Change((SMALL,)),
    "dual_clip": Change(("1.0001",)),
    "entropy_coefficient": Change(("0.5",)),
    "kl.coefficient": Change(("0.5",)),
    "kl.placement": Change(("loss", "reward"), (KL,)),
    "kl.estimator": Change(("k2", "k3"), (KL,)),
    "kl.target": Change(("0.001",), (KL, "algorithm.kl.horizon=8")),
    "kl.horizon": Change(("8",), (KL, "algorithm.kl.target=0.001")),
    "kl.min_coefficient": Change(("0.5",), ADAPTED),
    "kl.max_coefficient": Change(
        ("0.5",), (KL, "algorithm.kl.target=1e-9", "algorithm.kl.horizon=1000", "job.iterations=4")
    ),
    "off_policy.correction": Change(("token-tis",), ("algorithm.off_policy.high=1",)),
    "off_policy.low": Change(("1",), ("algorithm.off_policy.correction=icepop",)),
    "off_policy.high": Change(("1",), (CORRECTED,)),
    "off_policy.opsm_delta": Change(("1e-9",)),
    "num_minibatches": Change(("4",)),
    "num_epochs": Change(("3",)),
    "old_logprobs": Change(("rollout", "recompute")),
    "fraction": Change(("0.5",)),
    "covariance_low": Change(("-9",), ("algorithm.fraction=0.5",)),
    "covariance_high": Change(("0",), ("algorithm.fraction=0.5", "algorithm.covariance_low=-9e9")),
    "dynamic_sampling": Change(("streaming",)),
    "max_sampling_rounds": Change(("1",)),
    "overlong_buffer": Change(("5",)),
    "overlong_filter": Change(("true",)),
    "beta": Change(("0.9",)),
    "loss_type": Change(("ipo",)),
    "label_smoothing": Change(("0.3",)),
    "normalize_by_std": Change(("false", "true")),
    "divergence": Change(("kl",)),
    "limit_low": Change((SMALL,)),
    "limit_high": Change((SMALL,)),
    "ratio_limit": Change(("1.0001",)),
    "loss_aggregation": Change(("seq-mean-token-sum",)),
    "rewards": Change(("{right: 3}",)),
    "gamma": Change(("0.5",)),
    "step_weight": Change(("0.1",)),
    "divergence.kind": Change(("forward",)),
    "divergence.beta": Change(("0.1",), ("algorithm.divergence.kind=js",)),
    "divergence.top_k": Change(("2",)),
    "divergence.tail": Change(("renormalized",), ("algorithm.divergence.top_k=2",)),
    "data_fraction": Change(("0.5",)),
    "penalty": Change(("9",), ("algorithm.fraction=0.5",)),
    "turn_weight": Change(("0.1",)),
    "buffer_samples": Change(("16",)),
    "draws_per_prompt": Change(("2",)),
    "resampling": Change(("best_worst",)),
    "filter_probability": Change(("0.9",)),
    "power": Change(("9",), ("algorithm.resampling=pow",)),
    "lam": Change(("0.3",)),
    "critic_lam": Change(("0.3",)),
    "critic_warmup": Change(("1",)),
    "value_clip": Change((SMALL,)),
    "accuracy_low": Change(("0.9",)),
    "accuracy_high": Change(("0.01",)),
    "process_weight": Change(("0.1",)),
    "process_update": Change(("after",)),
    "process_minibatches": Change(("2",)),
    "tau_positive": Change(("9",)),
    "tau_negative": Change(("9",)),
    "lam_alpha": Change(("0.9",)),
    "imitation": Change(("0.9",)),
}


def keys_of(section: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """The keys of a recipe that are values, with their defaults."""
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        if inner := subsection(field.annotation):
            found |= keys_of(inner[1], f"{prefix}{name}.")
        else:
            found[prefix + name] = field.get_default(call_default_factory=True)
    return found


@cache
def recipe_keys(name: str) -> dict[str, Any]:
    """The keys of the recipe NAME."""
    return keys_of(load_recipe(name).config)


def setup(name: str, other_model: Path) -> list[str]:
    """Overrides: a short run of a recipe whose steps are so large that every bound is reached."""
    keys = recipe_keys(name)
    small = {"prompts_per_iteration": 8, "pairs_per_iteration": 8, "examples_per_iteration": 8, "num_minibatches": 2}
    small |= {"critic_warmup": 0, "buffer_samples": 32}
    return [
        *(f"algorithm.{key}={value}" for key, value in small.items() if key in keys),
        "actor.optimizer={lr: 0.03, warmup_steps: 0}",
        "critic.optimizer={lr: 0.03, warmup_steps: 0}",
        "reward_model.optimizer={lr: 0.03, warmup_steps: 0}",
        "process_reward.optimizer={lr: 0.03, warmup_steps: 0}",
        f"reference.path={other_model}",
        "job.iterations=2",
        "job.save=false",
        "checkpoint.every=0",
        "evaluation.every=0",
    ]


def changed(name: str, key: str, text: str) -> list[str]:
    """The overrides of a change; its others first."""
    of_key = CHANGES[key]
    default = str(recipe_keys(name)[key]).lower()
    value = next(value for value in of_key.values if value.lower() not in (default, text))
    return [*of_key.others, f"algorithm.{key}={value}"]


def outcome(output: Path) -> Any:
    """What a run has computed and written, without what no two runs share."""
    lines = [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in logged(output)]
    rows = [row for file in sorted(output.glob("samples/**/*.parquet")) for row in parquet.read_table(file).to_pylist()]
    samples = [{k: v for k, v in row.items() if k in ("prompt", "response", "reward", "tokens")} for row in rows]
    return lines, samples


def configuration(name: str) -> Path:
    """The shipped configuration of a recipe's small task."""
    return LETTERS / f"{name}.yaml"


def overrides_of(name: str, other_model: Path, others: Sequence[str]) -> list[str]:
    """Overrides of a run with others, which stand last and so win."""
    return [*setup(name, other_model), *others]
