"""Typed configuration: YAML, `a.b=c` overrides, and errors that name the key and the remedy.

A recipe brings the section `algorithm` as a subclass of `RecipeConfig` named `Config`; all other sections are the same
for every recipe. Reading never changes a value: derived values are methods of the code that uses them.

    YAML file    actor: {layout: tp2}      ─┐
    overrides    actor.optimizer.lr=1e-5   ─┴▶ tree of plain values ──▶ keys.py, pydantic ──▶ Config, frozen

An unknown key is reported before a missing or invalid value, since these often follow from a misspelled key.
"""

from verl_mg.config.alarm import AlarmConfig
from verl_mg.config.data import (
    CurriculumConfig,
    DataConfig,
    EvaluationConfig,
    EvaluationSetConfig,
    RewardConfig,
    SourceConfig,
    WeightedRewardConfig,
)
from verl_mg.config.optimizer import OptimizerConfig
from verl_mg.config.reading import apply_override, dump_config, load_config, read_tree, validate_config
from verl_mg.config.roles import (
    CriticConfig,
    FrozenConfig,
    GuardConfig,
    LoraConfig,
    MaxMismatch,
    Recompute,
    ReferenceConfig,
    RoleSection,
    RolloutConfig,
    TeacherConfig,
    TrainableConfig,
)
from verl_mg.config.section import ConfigSection, Count, RecipeConfig
from verl_mg.config.tree import (
    CheckpointConfig,
    Config,
    FsdpConfig,
    JobConfig,
    MegatronConfig,
    ModelConfig,
    ProfileConfig,
    RecordConfig,
    TrackingConfig,
    tree_for,
)
