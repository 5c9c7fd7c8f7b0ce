"""The whole tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, create_model, field_validator

from verl_mg.config.data import DataConfig, EvaluationConfig, RewardConfig
from verl_mg.config.roles import CriticConfig, ReferenceConfig, RolloutConfig, TrainableConfig
from verl_mg.config.section import ConfigSection


class ModelConfig(ConfigSection):
    """The Hugging Face directory that every role starts from."""

    path: Path
    dtype: Literal["float32", "bfloat16"] = "float32"


class JobConfig(ConfigSection):
    """Where the run goes and how long it is. `save`: write the trained model as a Hugging Face directory.

    `samples`: how many samples of an iteration each rank writes down, all unless given. `deterministic`: only kernels
    that repeat to the bit, and samples dealt to engines in a fixed way: slower. A rank that has not been heard of for
    `heartbeat_timeout_s` seconds, or a job in which no rank has gone on for `stall_timeout_s` seconds (0: any), is
    ended.
    """

    output: Path = Path("runs/job")
    iterations: PositiveInt = 100
    seed: int = 0
    save: bool = True
    console: bool = True
    samples: int | None = Field(None, ge=0)
    deterministic: bool = False
    heartbeat_timeout_s: float = Field(60.0, gt=0)
    stall_timeout_s: float = Field(3600.0, ge=0)


class CheckpointConfig(ConfigSection):
    """What a run that was ended goes on from, every `every` iterations (0: only when the job is told to leave).

    The last `keep` stay, and with `best`, a metric such as eval/reward, that with the highest one. `export_every`: so
    often the trained model is written as a Hugging Face directory too (0: never).
    """

    every: int = Field(20, ge=0)
    keep: PositiveInt = 2
    best: str | None = None
    export_every: int = Field(0, ge=0)


class TrackConfig(ConfigSection):
    """Where metrics go beside files, TensorBoard and the console. `name`: of the run, job.output's unless given."""

    to: list[Literal["wandb", "mlflow", "swanlab"]] = []
    project: str = "verl_mg"
    name: str | None = None


class ProfileConfig(ConfigSection):
    """`exact`: wait for devices and ranks between phases, so that `time/phase/` is exact, and tell at the end where
    the time went.

    In `iterations`, on `ranks` such as 0,8-11, torch's profiler writes a trace, with `memory` a memory snapshot too.
    """

    synchronize: bool = False
    iterations: list[PositiveInt] = []
    ranks: str = "0"
    memory: bool = False

    @field_validator("ranks", mode="before")
    @classmethod
    def _one_rank_is_text_too(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) else value  # as YAML reads it


class Config(ConfigSection):
    """The whole tree; `algorithm` is the recipe's own section."""

    model: ModelConfig
    data: DataConfig
    actor: TrainableConfig = TrainableConfig()
    critic: CriticConfig = CriticConfig()
    reward_model: CriticConfig = CriticConfig()
    process_reward: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    job: JobConfig = JobConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    profile: ProfileConfig = ProfileConfig()
    algorithm: Any = None


def tree_for(algorithm: type[ConfigSection]) -> type[Config]:
    """The configuration class of a recipe whose own section is `algorithm`."""
    return create_model("Config", __base__=Config, algorithm=(algorithm, Field(default_factory=algorithm)))
