"""The roles with a network, each under the layout of its section; built by all ranks together."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl_mg.clock import Clock
from verl_mg.config import Config, ReferenceConfig, TrainedConfig
from verl_mg.errors import UserError
from verl_mg.layout import Layout, Placement, parse_ranks
from verl_mg.layout.nearest import checked_on
from verl_mg.megatron.groups import ParallelGroups
from verl_mg.megatron.network import check_layout
from verl_mg.roles.actor import Actor
from verl_mg.roles.agenda import Agenda
from verl_mg.roles.critic import Critic, FrozenRewardModel, RewardModel
from verl_mg.roles.policy import Policy
from verl_mg.roles.residence import Residence
from verl_mg.roles.role import Role
from verl_mg.roles.trained import Trained
from verl_mg.weights import read_config, table
from verl_mg.weights.adapters import adapted_tensors

NETWORKS: dict[str, type[Role]] = {
    "actor": Actor,
    "critic": Critic,
    "reward_model": RewardModel,
    "frozen_reward_model": FrozenRewardModel,
    "process_reward": Actor,
    "reference": Policy,
}
"""What each role is; the section of the configuration has its name, or one of SECTIONS."""
SECTIONS = {"frozen_reward_model": "reward_model"}


class Networks:
    """ranks: how many of the job's ranks, the first ones, hold networks. agenda, residence: what all roles share."""

    def __init__(self, config: Config, ranks: int, learns: bool = True) -> None:
        self._config, self._ranks, self._learns = config, ranks, learns
        self._groups: dict[tuple[Placement, bool], ParallelGroups] = {}
        self.agenda, self.residence = Agenda(clock=Clock(config.profile.exact)), Residence()

    def check(self, roles: set[str], beside: str = "") -> None:
        """UserError, before any group or model exists, where a layout fits the ranks or the model not."""
        for role in sorted(roles & NETWORKS.keys()):
            section, model = self._section(role), read_config(self._path(role))
            own = f" on {section_of(role)}.ranks={section.ranks}" if section.ranks else beside
            try:
                experts = model.experts.count if model.experts else 0
                layout, ranks = Layout.parse(section.layout), self._standing(role)
                checked_on(layout, len(ranks), experts, partial(check_layout, model))
            except UserError as error:
                raise UserError(f"{section_of(role)}.layout={section.layout}{own}: {error}") from None
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
        section, kind = self._section(role), NETWORKS[role]
        options: dict[str, Any] = {}
        if isinstance(section, TrainedConfig) and issubclass(kind, Trained):
            options = {
                "name": role,
                "recompute": section.recompute,
                "optimizer": section.optimizer,
                "guard": section.guard,
                "lora": section.lora,
                "learns": self._learns,
            }
        built = kind(
            self._path(role),
            self._groups_of(self._placement(role), section.dynamic_context),
            dtype=torch.bfloat16 if self._config.model.dtype == "bfloat16" else torch.float32,
            temperature=self._config.rollout.temperature,
            tokens_per_micro_batch=section.tokens_per_micro_batch,
            **options,
        )
        built.agenda, built.residence, built.network.clock = self.agenda, self.residence, self.agenda.clock
        if section.offload:
            self.residence.join(built.host_copy)
        return built

    def _section(self, role: str) -> TrainedConfig | ReferenceConfig:
        section: TrainedConfig | ReferenceConfig = getattr(self._config, section_of(role))
        return section

    def _path(self, role: str) -> Path:
        return getattr(self._section(role), "path", None) or self._config.model.path

    def _placement(self, role: str) -> Placement:
        ranks = self._standing(role)
        return Placement(Layout.parse(self._section(role).layout).fit(len(ranks)), ranks)

    def _standing(self, role: str) -> tuple[int, ...]:
        section = self._section(role)
        ranks = parse_ranks(section.ranks) if section.ranks else tuple(range(self._ranks))
        if ranks[-1] >= self._ranks:
            raise UserError(
                f"rank {ranks[-1]} is none of the {self._ranks} that hold networks, 0 to {self._ranks - 1}; "
                f"write lower ones in {section_of(role)}.ranks, or start more"
            )
        return ranks

    def _groups_of(self, placement: Placement, dynamic: bool) -> ParallelGroups:
        key = (placement, dynamic)
        if key not in self._groups:
            self._groups[key] = ParallelGroups(placement, self._config.job.seed, short_contexts=dynamic)
        return self._groups[key]


def section_of(role: str) -> str:
    """Where the configuration describes it."""
    return SECTIONS.get(role, role)
