"""The training backends by name: how each builds and checks the models of roles.

Nothing else knows their names; the planner has the memory of each by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from verl_mg.checkpoint.peft import adapted_tensors
from verl_mg.config import Config, GuardConfig, OptimizerConfig, TrainableConfig
from verl_mg.config.roles import RoleSection
from verl_mg.errors import UserError
from verl_mg.fsdp.family_check import FamilyChecks
from verl_mg.fsdp.mesh import MeshGroups, check_mesh
from verl_mg.fsdp.model_runner import FsdpRunner
from verl_mg.fsdp.options import check_trainable
from verl_mg.fsdp.trainer import FsdpTrainer
from verl_mg.layout import Placement
from verl_mg.layout.suggest import resolve_layout
from verl_mg.megatron.balance_losses import check_balance_losses
from verl_mg.megatron.model_runner import MegatronRunner, check_layout
from verl_mg.megatron.multi_token import check_multi_token
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.megatron.trainer import MegatronTrainer, optimizer_config
from verl_mg.megatron.transformer_config import check_balancing, check_recompute, resolve_kernels, transformer_config
from verl_mg.models.hf_config import read_config
from verl_mg.models.hf_tensors import with_multi_token_layer
from verl_mg.roles.context import JobContext
from verl_mg.sharding.megatron import Kernels
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.module_table import module_table
from verl_mg.sharding.weight_table import weight_table
from verl_mg.training.model_spec import ModelSpec
from verl_mg.training.runner import Runner
from verl_mg.training.trainer import Trainer


@dataclass(frozen=True)
class Training:
    """Optimizer and guard of a role's model."""

    optimizer: OptimizerConfig
    guard: GuardConfig | None = None
    name: str = "actor"
    """The role, for errors and metrics."""


class Backend(ABC):
    """Training backend of one job; all ranks build together."""

    takes_images: ClassVar[bool]
    """Whether it trains vision-language models."""

    def __init__(self, config: Config, context: JobContext) -> None:
        self._config, self._context = config, context

    @staticmethod
    @abstractmethod
    def table(path: Path) -> ModelTable:
        """Returns the weight table of a model; UserError if it does not have the architecture."""

    @abstractmethod
    def kernels(self, path: Path, dtype: torch.dtype) -> Kernels:
        """Returns the kernels of a model, by `model.kernels`."""

    @abstractmethod
    def check(self, spec: ModelSpec, section: RoleSection, ranks: int, key: str, where: str) -> None:
        """Checks, before anything is built, that a role on some ranks has a layout and options that are supported.

        Errors name its section `key` and, for the layout, the remark `where`.
        """

    @abstractmethod
    def build(
        self, spec: ModelSpec, placement: Placement, dynamic_cp: bool, training: Training | None
    ) -> tuple[Runner, Trainer | None]:
        """Builds a model with its weights, and a trainer of it; UserError if it does not fit the layout."""


class MegatronBackend(Backend):
    """megatron-core, for the families of the weight table."""

    takes_images = False

    def __init__(self, config: Config, context: JobContext) -> None:
        super().__init__(config, context)
        self._groups: dict[tuple[Placement, bool], ParallelGroups] = {}

    @staticmethod
    def table(path: Path) -> ModelTable:
        """Returns the table of the family, with the layer of multi-token prediction that the directory has."""
        return weight_table(with_multi_token_layer(read_config(path), path))

    def kernels(self, path: Path, dtype: torch.dtype) -> Kernels:
        """Returns Transformer Engine's kernels or torch's."""
        return resolve_kernels(self._config.model.kernels, dtype, read_config(path))

    def check(self, spec: ModelSpec, section: RoleSection, ranks: int, key: str, where: str) -> None:
        """Checks layout, pipeline stages, adapters, and fields of megatron-core."""
        model, megatron = read_config(spec.path), spec.megatron
        with naming(f"{key}."):
            section.parallel_sizes.check_pipeline_layers(model.layers)
        with naming(f"{key}.layout={section.layout}{where}: "):
            experts = model.experts.count if model.experts else 0
            check = partial(check_layout, model, spec=spec)
            layout = resolve_layout(section.parallel_sizes, ranks, experts, check)
        with naming(f"{key}."):
            check_recompute(model, spec)
        transformer_config(model, layout, spec)
        if isinstance(section, TrainableConfig):
            check_balancing(model, megatron, spec.lora is not None)
            check_balance_losses(model, megatron)
            if spec.keeps_multi_token:
                check_multi_token(with_multi_token_layer(model, spec.path), megatron, spec.lora is not None)
            optimizer_config(section.optimizer, megatron, spec.dtype)
        if spec.lora:
            with naming(f"{key}."):
                adapted_tensors(weight_table(model), spec.lora.targets, spec.lora.experts)

    def build(
        self, spec: ModelSpec, placement: Placement, dynamic_cp: bool, training: Training | None
    ) -> tuple[Runner, Trainer | None]:
        """Builds chunks under the process groups of the placement."""
        # Roles with one placement share its groups: each rank takes part in the creation of every group.
        key, shared = (placement, dynamic_cp), self._context.process_groups
        if key not in self._groups:
            self._groups[key] = ParallelGroups(placement, self._config.job.seed, dynamic_cp, shared)
        runner = MegatronRunner(spec, self._groups[key], self._context.directories, self._context.timer)
        if training is None:
            return runner, None
        return runner, MegatronTrainer(runner, training.optimizer, training.guard, training.name)


class FsdpBackend(Backend):
    """`fully_shard` over modules of `transformers`."""

    takes_images = True

    def __init__(self, config: Config, context: JobContext) -> None:
        super().__init__(config, context)
        self._groups: dict[tuple[Placement, bool], MeshGroups] = {}
        self._families = FamilyChecks()

    @staticmethod
    def table(path: Path) -> ModelTable:
        """Returns the table of the module of `transformers`."""
        return module_table(path)

    def kernels(self, path: Path, dtype: torch.dtype) -> Kernels:
        """Returns torch's, whatever the setting."""
        return "torch"

    def check(self, spec: ModelSpec, section: RoleSection, ranks: int, key: str, where: str) -> None:
        """Checks sizes and options, without config.json; the module itself is checked when it is built."""
        # config.json may be of an architecture without a table of weights.
        with naming(f"{key}.layout={section.layout}{where}: "):
            check_mesh(section.parallel_sizes.fit(ranks), spec.fsdp.replicas)
        if isinstance(section, TrainableConfig):
            check_trainable(section, key)

    def build(
        self, spec: ModelSpec, placement: Placement, dynamic_cp: bool, training: Training | None
    ) -> tuple[Runner, Trainer | None]:
        """Builds a module on the mesh of the placement."""
        key, shared = (placement, dynamic_cp), self._context.process_groups
        if key not in self._groups:
            self._groups[key] = MeshGroups(placement, spec.fsdp.replicas, dynamic_cp, shared)
        runner = FsdpRunner(spec, self._groups[key], self._context.directories, self._context.timer, self._families)
        if training is None:
            return runner, None
        return runner, FsdpTrainer(runner, training.optimizer, training.guard, training.name)


BACKENDS: dict[str, type[Backend]] = {"megatron": MegatronBackend, "fsdp": FsdpBackend}
"""Backends by their names in `backend` of a role's section."""


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Context manager: errors begin with a key."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{key}{error}") from None
