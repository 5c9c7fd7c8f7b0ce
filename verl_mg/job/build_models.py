"""Builds the model roles of a job, each with the layout of its configuration section."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl_mg.checkpoint.peft import adapted_tensors
from verl_mg.config import Config, FrozenConfig, TrainableConfig
from verl_mg.data.prompts import Prompt
from verl_mg.errors import UserError
from verl_mg.fsdp.mesh import MeshGroups, check_mesh
from verl_mg.fsdp.trainer import check_trainable
from verl_mg.layout import Layout, Placement, parse_ranks
from verl_mg.layout.suggest import resolve_layout
from verl_mg.megatron.balance_losses import check_balance_losses
from verl_mg.megatron.kernels import resolve_kernels
from verl_mg.megatron.model_runner import check_layout
from verl_mg.megatron.multi_token import check_multi_token
from verl_mg.megatron.optimizer_config import optimizer_config
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.megatron.transformer_config import check_balancing, check_recompute, transformer_config
from verl_mg.models.hf_config import HFConfig, read_config
from verl_mg.models.hf_tensors import with_multi_token_layer
from verl_mg.roles.backends import Groups
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor, Critic, Policy, RewardModel, TrainableRewardModel, UnadaptedPolicy
from verl_mg.roles.reference import Reference
from verl_mg.roles.role import Role
from verl_mg.roles.trainable import TrainableRole
from verl_mg.sharding.megatron import Kernels
from verl_mg.sharding.weight_table import weight_table

MODEL_ROLES: dict[str, type[Role]] = {
    "actor": Actor,
    "critic": Critic,
    "reward_model": TrainableRewardModel,
    "frozen_reward_model": RewardModel,
    "process_reward": Actor,
    "reference": Reference,
}
"""Class of each model role by name; its configuration section has the same name, except those in SECTIONS."""
SECTIONS = {"frozen_reward_model": "reward_model"}
TEACHERS = "teachers"
"""Role of a recipe that has a model role `teachers.NAME` for each teacher of the configuration."""


class ModelRoleBuilder:
    """Builder of model roles on the first `ranks` ranks of the job; all ranks call its methods together.

    `learns`: with optimizers. `from_checkpoint`: what is trained is uninitialized until a checkpoint restores it.
    """

    def __init__(
        self, config: Config, ranks: int, context: JobContext, learns: bool = True, from_checkpoint: bool = False
    ) -> None:
        self._config, self._ranks, self._learns, self._from_checkpoint = config, ranks, learns, from_checkpoint
        self._groups: dict[tuple[Placement, bool, str], Groups] = {}
        self._built: dict[str, Any] = {}
        self._context = context

    def model_roles(self, roles: set[str]) -> list[str]:
        """Returns the names of the model roles among requested ones, in the order in which they are built."""
        teachers = self._config.teachers.items() if TEACHERS in roles else ()
        local = [f"{TEACHERS}.{name}" for name, teacher in teachers if teacher.has_model]
        return [*(role for role in MODEL_ROLES if role in roles), *local]

    def check(self, roles: set[str], remark: str = "") -> None:
        """Checks the layouts of roles before anything is built; UserError, with `remark`, if one does not fit."""
        for role in sorted(self.model_roles(roles)):
            section = self._section(role)
            if section.backend == "fsdp":
                # Before config.json is read as Megatron's: it may be of an architecture without a table.
                self._check_fsdp(role, remark)
                continue
            model = read_config(self._path(role))
            try:
                section.parallel_sizes.check_pipeline_layers(model.layers)
            except UserError as error:
                raise UserError(f"{config_section_of(role)}.{error}") from None
            where = f" on {config_section_of(role)}.ranks={section.ranks}" if section.ranks else remark
            try:
                experts = model.experts.count if model.experts else 0
                layout, ranks = section.parallel_sizes, self._ranks_of(role)
                check = partial(check_layout, model, kernels=self._kernels(role), megatron=self._config.megatron)
                resolved = resolve_layout(layout, len(ranks), experts, check)
            except UserError as error:
                raise UserError(f"{config_section_of(role)}.layout={section.layout}{where}: {error}") from None
            self._check_megatron(role, model, resolved)
            self._check_lora(role)

    def check_images(self, roles: set[str], prompts: Iterable[Prompt]) -> None:
        """Checks that the backends of roles take the images of prompts; Megatron trains only language models."""
        sections = {config_section_of(role): self._section(role) for role in sorted(self.model_roles(roles))}
        refuses = next((name for name, section in sections.items() if section.backend == "megatron"), None)
        if refuses and (shown := next((prompt for prompt in prompts if prompt.images), None)):
            raise UserError(
                f"{shown.place}: the prompt has images, but {refuses}.backend=megatron has no vision tower. Leave out "
                f"such records, or use {refuses}.backend=fsdp and a model that it trains, such as Qwen3-VL."
            )

    def _check_fsdp(self, role: str, remark: str) -> None:
        """Checks layout and options of a role with the FSDP backend; the module itself is checked when it is built."""
        section, name = self._section(role), config_section_of(role)
        where = f" on {name}.ranks={section.ranks}" if section.ranks else remark
        try:
            check_mesh(section.parallel_sizes.fit(len(self._ranks_of(role))), self._config.fsdp.replicas)
        except UserError as error:
            raise UserError(f"{name}.layout={section.layout}{where}: {error}") from None
        if isinstance(section, TrainableConfig):
            check_trainable(section, name)
        if role == "actor" and self._config.rollout.replay_routing:
            raise UserError("rollout.replay_routing: not with actor.backend=fsdp. Leave it out.")

    def _check_megatron(self, role: str, model: HFConfig, layout: Layout) -> None:
        """Checks the section `megatron` and the keys of a role that become fields of megatron-core."""
        section, megatron = self._section(role), self._config.megatron
        dtype, kernels = self._dtype(role), self._kernels(role)
        if isinstance(section, TrainableConfig):
            try:
                check_recompute(model, section.recompute)
            except UserError as error:
                raise UserError(f"{config_section_of(role)}.{error}") from None
            transformer_config(model, layout, dtype, section.recompute, kernels, megatron)
            check_balancing(model, megatron, section.lora is not None)
            check_balance_losses(model, megatron)
            # Only the actor has the layer, see `Role.keeps_multi_token`.
            if kind_of(role).keeps_multi_token:
                check_multi_token(with_multi_token_layer(model, self._path(role)), megatron, section.lora is not None)
            optimizer_config(section.optimizer, megatron, dtype)
        else:
            transformer_config(model, layout, dtype, False, kernels, megatron)

    def _check_lora(self, role: str) -> None:
        section = self._section(role)
        if isinstance(section, TrainableConfig) and section.lora:
            try:
                adapted_tensors(weight_table(read_config(self._path(role))), section.lora.targets, section.lora.experts)
            except UserError as error:
                raise UserError(f"{role}.{error}") from None

    def build(self, role: str) -> Any:
        """Returns the role, with the weights of its model directory except those that a checkpoint restores."""
        # A role with offload leaves the device immediately, so that the next one has the whole of it. One that stays
        # allocates everything that it keeps, so that engines size their cache by the memory that is left.
        self._built[role] = built = self._build(role)
        return built

    def _build(self, role: str) -> Role:
        section, kind = self._section(role), kind_of(role)
        # With LoRA the weights under the adapters are the reference: a second copy of the model is not needed.
        if role == "reference" and "actor" in self._built and self._config.reference_is_unadapted_actor:
            return UnadaptedPolicy(self._built["actor"], section.tokens_per_micro_batch, role)
        options: dict[str, Any] = {}
        if isinstance(section, TrainableConfig) and issubclass(kind, TrainableRole):
            options = {
                "recompute": section.recompute,
                "optimizer": section.optimizer.with_steps(self._config.num_updates(config_section_of(role))),
                "guard": section.guard,
                "lora": section.lora,
                "learns": self._learns,
                "from_checkpoint": self._from_checkpoint,
            }
        built = kind(
            self._path(role),
            self._groups_of(self._placement(role), section.dynamic_context, section.backend),
            self._context,
            dtype=self._dtype(role),
            kernels=self._kernels(role) if section.backend == "megatron" else "torch",
            temperature=self._config.rollout.temperature,
            tokens_per_micro_batch=section.tokens_per_micro_batch,
            megatron=self._config.megatron,
            fsdp=self._config.fsdp,
            name=role,
            **options,
        )
        if section.offload:
            self._context.offload.register(built.cpu_offload)
            built.cpu_offload.to_host()
        elif isinstance(built, TrainableRole):
            built.allocate_moments()
        return built

    def _section(self, role: str) -> TrainableConfig | FrozenConfig:
        section = self._config.section(config_section_of(role))
        assert isinstance(section, TrainableConfig | FrozenConfig)
        return section

    def _dtype(self, role: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._config.dtype_of(config_section_of(role)))
        return dtype

    def _kernels(self, role: str) -> Kernels:
        # On the FSDP backend the model may be one that Megatron has not, and whose config.json is not read here.
        model = read_config(self._path(role)) if self._section(role).backend == "megatron" else None
        return resolve_kernels(self._config.model.kernels, self._dtype(role), model)

    def _path(self, role: str) -> Path:
        return getattr(self._section(role), "path", None) or self._config.model.path

    def _placement(self, role: str) -> Placement:
        ranks = self._ranks_of(role)
        return Placement(self._section(role).parallel_sizes.fit(len(ranks)), ranks)

    def _ranks_of(self, role: str) -> tuple[int, ...]:
        section = self._section(role)
        ranks = parse_ranks(section.ranks) if section.ranks else tuple(range(self._ranks))
        if ranks[-1] >= self._ranks:
            raise UserError(
                f"rank {ranks[-1]} is out of range, models can be placed on ranks 0 to {self._ranks - 1}. "
                f"Lower {config_section_of(role)}.ranks, or start more ranks."
            )
        return ranks

    def _groups_of(self, placement: Placement, dynamic: bool, backend: str) -> Groups:
        # Roles with one placement share its groups: each rank takes part in the creation of every group.
        key = (placement, dynamic, backend)
        if key not in self._groups:
            shared = self._context.process_groups
            self._groups[key] = (
                MeshGroups(placement, self._config.fsdp.replicas, dynamic, shared)
                if backend == "fsdp"
                else ParallelGroups(placement, self._config.job.seed, dynamic, shared)
            )
        return self._groups[key]


def kind_of(role: str) -> type[Role]:
    """Returns the class of a model role."""
    return Policy if role.startswith(f"{TEACHERS}.") else MODEL_ROLES[role]


def config_section_of(role: str) -> str:
    """Returns the configuration section of a role."""
    return SECTIONS.get(role, role)
