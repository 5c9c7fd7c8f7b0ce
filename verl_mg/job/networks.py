"""The roles with a network, each under the layout of its section; built by all ranks together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from verl_mg.config import Config, ReferenceConfig, TrainedConfig
from verl_mg.errors import UserError
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.groups import ParallelGroups
from verl_mg.megatron.network import check_layout
from verl_mg.roles.actor import Actor
from verl_mg.roles.critic import Critic, RewardModel
from verl_mg.roles.policy import Policy
from verl_mg.roles.role import Role
from verl_mg.weights import read_config, table
from verl_mg.weights.adapters import adapted_tensors

NETWORKS: dict[str, type[Role]] = {
    "actor": Actor,
    "critic": Critic,
    "reward_model": RewardModel,
    "process_reward": Actor,
    "reference": Policy,
}
"""What each role is; the section of the configuration has its name."""


class Networks:
    """ranks: how many of the job's ranks, the first ones, hold networks."""

    def __init__(self, config: Config, ranks: int) -> None:
        self._config, self._ranks = config, ranks
        self._groups: dict[Placement, ParallelGroups] = {}

    def check(self, roles: set[str], beside: str = "") -> None:
        """UserError, before any group or model exists, where a layout fits the ranks or the model not."""
        for role in sorted(roles & NETWORKS.keys()):
            layout = self._section(role).layout
            try:
                check_layout(read_config(self._path(role)), Layout.parse(layout).fit(self._ranks))
            except UserError as error:
                raise UserError(f"{role}.layout={layout}{beside}: {error}") from None
            self._check_lora(role)

    def _check_lora(self, role: str) -> None:
        section = self._section(role)
        if isinstance(section, TrainedConfig) and section.lora:
            try:
                adapted_tensors(table(read_config(self._path(role))), section.lora.targets)
            except UserError as error:
                raise UserError(f"{role}.{error}") from None

    def build(self, role: str) -> Any:
        """The role, with the weights of its model's directory."""
        section = self._section(role)
        options: dict[str, Any] = {}
        if isinstance(section, TrainedConfig):
            options = {
                "name": role,
                "recompute": section.recompute,
                "optimizer": section.optimizer,
                "guard": section.guard,
                "lora": section.lora,
            }
        return NETWORKS[role](
            self._path(role),
            self._groups_of(section.layout),
            dtype=torch.bfloat16 if self._config.model.dtype == "bfloat16" else torch.float32,
            temperature=self._config.rollout.temperature,
            tokens_per_micro_batch=section.tokens_per_micro_batch,
            **options,
        )

    def _section(self, role: str) -> TrainedConfig | ReferenceConfig:
        section: TrainedConfig | ReferenceConfig = getattr(self._config, role)
        return section

    def _path(self, role: str) -> Path:
        return getattr(self._section(role), "path", None) or self._config.model.path

    def _groups_of(self, layout: str) -> ParallelGroups:
        placement = Placement.on(Layout.parse(layout), self._ranks)
        if placement not in self._groups:
            self._groups[placement] = ParallelGroups(placement, self._config.job.seed)
        return self._groups[placement]
