"""The typed configuration tree: YAML, `a.b=c` overrides, and errors that say what to write instead.

A recipe brings its own section, `algorithm`, as a subclass of `Section` named `Config`; the rest is the
same for every recipe. Nothing here changes what was written: derived values are methods of the readers.
"""

from verl_mg.config.data import CurriculumConfig, DataConfig, EvaluationConfig, MixedReward, RewardConfig, SourceConfig
from verl_mg.config.reading import dump_config, load_config
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
from verl_mg.config.section import Section
from verl_mg.config.tree import Config, JobConfig, ModelConfig, tree_for

__all__ = [
    "Config",
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
    "ReferenceConfig",
    "RewardConfig",
    "RoleSection",
    "RolloutConfig",
    "Section",
    "SourceConfig",
    "TrainedConfig",
    "dump_config",
    "load_config",
    "tree_for",
]
