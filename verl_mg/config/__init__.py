"""The typed configuration tree: YAML, `a.b=c` overrides, and errors that say what to write instead.

A recipe brings its own section, `algorithm`, as a subclass of `RecipeConfig` named `Config`; the rest is the
same for every recipe. Nothing here changes what was written: derived values are methods of the readers.
"""

from verl_mg.config.data import (
    CurriculumConfig,
    DataConfig,
    EvaluationConfig,
    RewardConfig,
    SourceConfig,
    WeightedRewardConfig,
)
from verl_mg.config.reading import dump_config, load_config, validate_config
from verl_mg.config.roles import (
    CriticConfig,
    GuardConfig,
    LoraConfig,
    OptimizerConfig,
    ReferenceConfig,
    RoleSection,
    RolloutConfig,
    TrainableConfig,
)
from verl_mg.config.section import ConfigSection, Count, RecipeConfig
from verl_mg.config.tree import CheckpointConfig, Config, JobConfig, ModelConfig, ProfileConfig, TrackConfig, tree_for

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigSection",
    "Count",
    "CriticConfig",
    "CurriculumConfig",
    "DataConfig",
    "EvaluationConfig",
    "GuardConfig",
    "JobConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ProfileConfig",
    "RecipeConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RoleSection",
    "RolloutConfig",
    "SourceConfig",
    "TrackConfig",
    "TrainableConfig",
    "WeightedRewardConfig",
    "dump_config",
    "load_config",
    "tree_for",
    "validate_config",
]
