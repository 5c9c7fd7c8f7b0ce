"""The typed configuration tree: YAML, `a.b=c` overrides, and errors that say what to write instead.

A recipe brings its own section, `algorithm`, as a subclass of `Section` named `Config`; the rest is the
same for every recipe. Nothing here changes what was written: derived values are methods of the readers.
"""

from verl_mg.config.data import CurriculumConfig, DataConfig, EvaluationConfig, MixedReward, RewardConfig, SourceConfig
from verl_mg.config.reading import checked_config, dump_config, load_config
from verl_mg.config.roles import (
    CriticConfig,
    GuardConfig,
    LoraConfig,
    OptimizerConfig,
    ReferenceConfig,
    RoleSection,
    RolloutConfig,
    TrainedConfig,
)
from verl_mg.config.section import Count, Section
from verl_mg.config.tree import CheckpointConfig, Config, JobConfig, ModelConfig, ProfileConfig, TrackConfig, tree_for

__all__ = [
    "CheckpointConfig",
    "Config",
    "Count",
    "CriticConfig",
    "CurriculumConfig",
    "DataConfig",
    "EvaluationConfig",
    "GuardConfig",
    "JobConfig",
    "LoraConfig",
    "MixedReward",
    "ModelConfig",
    "OptimizerConfig",
    "ProfileConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RoleSection",
    "RolloutConfig",
    "Section",
    "SourceConfig",
    "TrackConfig",
    "TrainedConfig",
    "checked_config",
    "dump_config",
    "load_config",
    "tree_for",
]
