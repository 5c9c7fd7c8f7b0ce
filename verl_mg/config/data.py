"""What goes in and what it is worth: prompts, rewards, evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PositiveInt, TypeAdapter, field_validator, model_validator

from verl_mg.config.section import ConfigSection


class SourceConfig(ConfigSection):
    """One of several sources of prompts. `weight`: its share of the prompts taken, against the other sources'; a test
    has none. Fields and instruction are those of `data` unless given."""

    path: Path
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    prompt_field: str | None = None
    answer_field: str | None = None
    instruction: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if not isinstance(value, dict | SourceConfig):
            raise ValueError("write a mapping, {path: ...}")
        # The names of sources are the user's, so `_nearest` finds no key of a source.
        unknown = [key for key in value if key not in cls.model_fields] if isinstance(value, dict) else []
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r}; a source has {', '.join(cls.model_fields)}")
        return value


class CurriculumConfig(ConfigSection):
    """Skip training prompts whose pass rate is outside [low, high]; 0 and 1 skip none. One that is skipped `revisit`
    times running is taken again. An answer passes with a reward of `pass_threshold` or more; a prompt's rate is a
    running average in which the past weighs `decay`."""

    low: float = Field(0.0, ge=0, le=1)
    high: float = Field(1.0, ge=0, le=1)
    revisit: PositiveInt = 3
    pass_threshold: float = 0.5
    decay: float = Field(0.5, ge=0, lt=1)

    @field_validator("high")
    @classmethod
    def _not_below_low(cls, high: float, info: Any) -> float:
        if high < info.data.get("low", 0.0):
            raise ValueError("must not be smaller than low")
        return high


class DataConfig(ConfigSection):
    """Prompts, and which fields of a record to read.

    `train`, `test`: a path, or several sources as `NAME: {path: ..., weight: ...}`. A path is a .jsonl, .json (lines)
    or .parquet file, a folder of shards, a pattern such as data/train-*.parquet, or a folder that save_to_disk of
    Hugging Face datasets has written. `chosen_field`, `rejected_field`: the answers of a preference.
    """

    train: Path | dict[str, SourceConfig]
    test: Path | dict[str, SourceConfig] | None = None
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    chat_template: bool = False
    instruction: str = ""
    max_prompt_tokens: PositiveInt = 1024
    overlong_prompts: Literal["error", "drop"] = "error"
    curriculum: CurriculumConfig = CurriculumConfig()

    @field_validator("train", "test", mode="before")
    @classmethod
    def _path_or_sources(cls, value: Any, info: Any) -> Any:
        # Decided here, or an error would list the complaints of both kinds.
        if isinstance(value, dict) and value:
            return TypeAdapter(dict[str, SourceConfig]).validate_python(value)
        if isinstance(value, str | Path) or (value is None and info.field_name == "test"):
            return value
        raise ValueError("write a path, or sources as NAME: {path: ...}")

    @field_validator("rejected_field")
    @classmethod
    def _not_the_chosen(cls, name: str, info: Any) -> str:
        if name == info.data.get("chosen_field"):
            raise ValueError("must be another field than chosen_field")
        return name


def _named(function: str | Callable[..., Any]) -> str:
    """As a file can say it: a script may give the function itself."""
    return function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"


RewardFunction = Annotated[str | Callable[..., Any], PlainSerializer(_named, return_type=str)]


class WeightedRewardConfig(ConfigSection):
    """One reward of a mixture. Weight 0: it is only logged."""

    function: RewardFunction
    options: dict[str, Any] = {}
    weight: float = Field(1.0, allow_inf_nan=False)


class RewardConfig(ConfigSection):
    """`package.module:thing` or `path/file.py:thing`, with `options` as keyword arguments; see `load_reward`.

    `mixture`: rewards by name, whose weighted sum takes the place of `function`. `weights_file`: JSON or YAML, read
    once an iteration where it has changed, with new weights by name. `workers`: calls of a reward on a rank at once.
    """

    function: RewardFunction = "verl_mg.rewards.math:score"
    options: dict[str, Any] = {}
    mixture: dict[str, WeightedRewardConfig] = {}
    weights_file: Path | None = None
    workers: PositiveInt = 8

    @field_validator("mixture")
    @classmethod
    def _has_the_options(cls, mixture: dict[str, WeightedRewardConfig], info: Any) -> dict[str, WeightedRewardConfig]:
        if mixture and info.data.get("options"):
            raise ValueError("write the options under each reward of the mixture, not beside it")
        return mixture

    @field_validator("weights_file")
    @classmethod
    def _has_a_mixture(cls, file: Path | None, info: Any) -> Path | None:
        if file is not None and not info.data.get("mixture"):
            raise ValueError("there is no mixture whose weights it could tell; write reward.mixture")
        return file


class EvaluationConfig(ConfigSection):
    """Answers to `data.test`, scored by the reward, every `every` iterations (0: never).

    To the first `prompts` prompts of each source, `samples` answers each at `temperature` (0: greedy). An answer passes
    with a reward of `pass_threshold` or more.
    """

    every: int = Field(0, ge=0)
    prompts: PositiveInt = 256
    samples: PositiveInt = 1
    temperature: float = Field(0.0, ge=0, validate_default=True)
    pass_threshold: float = 1.0

    @field_validator("temperature")
    @classmethod
    def _no_copies(cls, temperature: float, info: Any) -> float:
        if temperature == 0 and info.data.get("samples", 1) > 1:
            raise ValueError("greedy samples are copies; write a temperature such as 0.6, or evaluation.samples=1")
        return temperature
