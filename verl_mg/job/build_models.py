"""Builds the model roles of a job, each with the layout of its configuration section."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import torch

from verl_mg.config import Config, FrozenConfig, TrainableConfig
from verl_mg.data.prompts import Prompt
from verl_mg.errors import UserError
from verl_mg.job.backends import BACKENDS, Training, naming
from verl_mg.job.recipe import MODEL_ROLES, TEACHERS
from verl_mg.layout import Placement, parse_ranks
from verl_mg.models.hf_config import UnknownFamilyError
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import (
    Actor,
    Critic,
    Policy,
    Reference,
    RewardModel,
    TrainableRewardModel,
    TrainableRole,
    UnadaptedPolicy,
)
from verl_mg.roles.role import Batching, Role
from verl_mg.training.microbatch import SAMPLER_TOP
from verl_mg.training.model_spec import ModelSpec

CLASSES: Mapping[str, type[Role]] = dict(
    zip(MODEL_ROLES, (Actor, Critic, TrainableRewardModel, RewardModel, Actor, Reference), strict=True)
)
"""Class of each model role by name; its configuration section has the same name, except those in SECTIONS."""
SECTIONS = {"frozen_reward_model": "reward_model"}


class ModelRoleBuilder:
    """Builder of model roles on the first `ranks` ranks of the job; all ranks call its methods together.

    `learns`: with optimizers. `from_checkpoint`: what is trained is uninitialized until a checkpoint restores it.
    """

    def __init__(
        self, config: Config, ranks: int, context: JobContext, learns: bool = True, from_checkpoint: bool = False
    ) -> None:
        self._config, self._ranks, self._learns, self._from_checkpoint = config, ranks, learns, from_checkpoint
        self._backends = {name: backend(config, context) for name, backend in BACKENDS.items()}
        self._built: dict[str, Any] = {}
        self._context = context

    def model_roles(self, roles: Set[str]) -> list[str]:
        """Returns the names of the model roles among requested ones, in the order in which they are built."""
        teachers = self._config.teachers.items() if TEACHERS in roles else ()
        local = [f"{TEACHERS}.{name}" for name, teacher in teachers if teacher.has_model]
        return [*(role for role in MODEL_ROLES if role in roles), *local]

    def check(self, roles: Set[str], remark: str = "") -> None:
        """Checks the layouts of roles before anything is built; UserError, with `remark`, if one does not fit."""
        for role in sorted(self.model_roles(roles)):
            section, key = self._section(role), config_section_of(role)
            where = f" on {key}.ranks={section.ranks}" if section.ranks else remark
            with naming(f"{key}.layout={section.layout}{where}: "):
                ranks = len(self._ranks_of(role))
            try:
                self._backends[section.backend].check(self._spec(role), section, ranks, key, where)
            except UnknownFamilyError as error:
                raise UserError(f"{key}.backend={section.backend}: {error} Or write {key}.backend=fsdp.") from None

    def check_images(self, roles: Set[str], prompts: Iterable[Prompt]) -> None:
        """Checks that the backends of roles take the images of prompts; Megatron trains only language models."""
        sections = {config_section_of(role): self._section(role) for role in sorted(self.model_roles(roles))}
        refuses = next((name for name, s in sections.items() if not self._backends[s.backend].takes_images), None)
        if refuses and (shown := next((prompt for prompt in prompts if prompt.images), None)):
            others = " or ".join(name for name, backend in self._backends.items() if backend.takes_images)
            raise UserError(
                f"{shown.place}: the prompt has images, but {refuses}.backend={sections[refuses].backend} has no "
                f"vision tower. Leave out such records, or use {refuses}.backend={others} and a model that it trains, "
                "such as Qwen3-VL."
            )

    def build(self, role: str) -> Any:
        """Returns the role, with the weights of its model directory except those that a checkpoint restores."""
        # A role with offload leaves the device immediately, so that the next one has the whole of it. One that stays
        # allocates everything that it keeps, so that engines size their cache by the memory that is left.
        self._built[role] = built = self._build(role)
        return built

    def _build(self, role: str) -> Role:
        section, kind, context = self._section(role), kind_of(role), self._context
        support = self._config.algorithm.support
        on_support = support == "sampled" or (support == "policy" and role == "actor")
        likeliest = SAMPLER_TOP if role == "actor" and self._config.sampler_top else None
        batching = Batching(
            self._config.rollout.temperature, section.tokens_per_micro_batch, on_support=on_support, likeliest=likeliest
        )
        # With LoRA the weights under the adapters are the reference: a second copy of the model is not needed.
        if role == "reference" and "actor" in self._built and self._config.reference_is_unadapted_actor:
            return UnadaptedPolicy(self._built["actor"], batching, role, context)
        runner, trainer = self._backends[section.backend].build(
            self._spec(role), self._placement(role), section.dynamic_context, self._training(role)
        )
        built = (
            kind(runner, batching, role, context, trainer)
            if issubclass(kind, TrainableRole)
            else kind(runner, batching, role, context)
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

    def _trainable(self, role: str) -> TrainableConfig | None:
        """Returns the section of a role with an optimizer; None for others, whatever their section."""
        section = self._section(role)
        return section if isinstance(section, TrainableConfig) and issubclass(kind_of(role), TrainableRole) else None

    def _training(self, role: str) -> Training | None:
        section = self._trainable(role)
        if section is None or not self._learns:
            return None
        return Training(
            section.optimizer.with_steps(self._config.num_updates(config_section_of(role))), section.guard, role
        )

    def _spec(self, role: str) -> ModelSpec:
        """Returns what the model of a role is built from."""
        kind, path, trainable = kind_of(role), self._path(role), self._trainable(role)
        dtype: torch.dtype = getattr(torch, self._config.dtype_of(config_section_of(role)))
        return ModelSpec(
            path,
            dtype,
            head=kind.head,
            hidden_offset=kind.hidden_offset,
            keeps_multi_token=kind.keeps_multi_token,
            trained=trainable is not None and self._learns,
            from_checkpoint=trainable is not None and self._from_checkpoint,
            longest_row=self._config.data.max_prompt_tokens + self._config.rollout.max_new_tokens,
            # Teachers are not given the column: it has experts of the student.
            replays_routing=self._config.rollout.replay_routing and not role.startswith(f"{TEACHERS}."),
            recompute=trainable.recompute if trainable else False,
            lora=trainable.lora if trainable else None,
            kernels=self._backends[self._section(role).backend].kernels(path, dtype),
            megatron=self._config.megatron,
            fsdp=self._config.fsdp,
        )

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


def kind_of(role: str) -> type[Role]:
    """Returns the class of a model role."""
    return Policy if role.startswith(f"{TEACHERS}.") else CLASSES[role]


def config_section_of(role: str) -> str:
    """Returns the configuration section of a role."""
    return SECTIONS.get(role, role)
