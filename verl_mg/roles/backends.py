"""Construction of a role's model and its trainer by the backend of the role's process groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_mg.config import FsdpConfig, GuardConfig, MegatronConfig, OptimizerConfig
from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.fsdp.model_runner import ModuleRunner
from verl_mg.fsdp.trainer import ModuleTrainer
from verl_mg.megatron.model_runner import ModelRunner
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.megatron.trainer import Trainer as MegatronTrainer
from verl_mg.sharding.megatron import Kernels
from verl_mg.training.runner import Runner
from verl_mg.training.trainer import Trainer

Groups = ParallelGroups | MeshGroups


def build_runner(
    model_dir: Path,
    groups: Groups,
    *,
    trained: bool,
    kernels: Kernels = "torch",
    megatron: MegatronConfig | None = None,
    fsdp: FsdpConfig | None = None,
    keeps_multi_token: bool = False,
    **options: Any,
) -> Runner:
    """Builds the model of a role and loads its weights; a collective of all ranks of the job.

    `trained`: the weights, or adapters to them, are trained. `keeps_multi_token`: the layer of multi-token prediction
    is loaded too. UserError if the model cannot be read, or does not fit the layout.
    """
    # Modules of `transformers` do not have the layer of multi-token prediction.
    if isinstance(groups, MeshGroups):
        return ModuleRunner(model_dir, groups, trained=trained, options=fsdp, **options)
    return ModelRunner(
        model_dir, groups, kernels=kernels, megatron=megatron, keeps_multi_token=keeps_multi_token, **options
    )


def build_trainer(runner: Runner, optimizer: OptimizerConfig, guard: GuardConfig | None, name: str) -> Trainer:
    """Builds the trainer of a model; UserError if its backend does not have the optimizer."""
    if isinstance(runner, ModuleRunner):
        return ModuleTrainer(runner, optimizer, guard, name)
    assert isinstance(runner, ModelRunner)
    return MegatronTrainer(runner, optimizer, guard, name)
