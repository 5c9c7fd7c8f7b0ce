"""The whole tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, create_model

from verl_mg.config.data import DataConfig, EvaluationConfig, RewardConfig
from verl_mg.config.roles import CriticConfig, ReferenceConfig, RolloutConfig, TrainedConfig
from verl_mg.config.section import Section


class ModelConfig(Section):
    """The Hugging Face directory that every role starts from."""

    path: Path
    dtype: Literal["float32", "bfloat16"] = "float32"


class JobConfig(Section):
    """Where the run goes and how long it is. `save`: write the trained model as a Hugging Face directory.

    `profile`: wait for devices and ranks between phases, so that `time/phase/` is exact, and tell at the end where the
    time went.
    """

    output: Path = Path("runs/job")
    iterations: PositiveInt = 100
    seed: int = 0
    save: bool = True
    console: bool = True
    profile: bool = False


class Config(Section):
    """The whole tree; `algorithm` is the recipe's own section."""

    model: ModelConfig
    data: DataConfig
    actor: TrainedConfig = TrainedConfig()
    critic: CriticConfig = CriticConfig()
    reward_model: CriticConfig = CriticConfig()
    process_reward: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    job: JobConfig = JobConfig()
    algorithm: Any = None


def tree_for(algorithm: type[Section]) -> type[Config]:
    """The configuration class of a recipe whose own section is `algorithm`."""
    return create_model("RecipeConfig", __base__=Config, algorithm=(algorithm, Field(default_factory=algorithm)))
