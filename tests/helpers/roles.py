"""Models and roles of tests, each with its own process groups."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from tests.helpers.rank_pool import job_context
from verl_mg.config import GuardConfig, OptimizerConfig
from verl_mg.errors import UserError
from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.fsdp.model_runner import FsdpRunner
from verl_mg.fsdp.trainer import FsdpTrainer
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.model_runner import MegatronRunner
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.megatron.trainer import MegatronTrainer
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import TrainableRole
from verl_mg.roles.role import Batching, Role
from verl_mg.training.model_spec import ModelSpec

AnyRole = TypeVar("AnyRole", bound=Role)


def megatron_runner(
    model: Path, layout: str | Layout = "tp1", dtype: torch.dtype = torch.float32, **options: Any
) -> MegatronRunner:
    """A model of the Megatron backend on all ranks; options: fields of `ModelSpec`."""
    sizes = Layout.parse(layout) if isinstance(layout, str) else layout
    groups = ParallelGroups(Placement.on(sizes, dist.get_world_size()))
    return MegatronRunner(ModelSpec(model, dtype, **options), groups)


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The message of the UserError that a call raises on a rank."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    return str(caught.value)


def build_role(
    kind: type[AnyRole],
    model: Path,
    groups: ParallelGroups | MeshGroups | str,
    context: JobContext | None = None,
    *,
    temperature: float = 1.0,
    tokens_per_micro_batch: int = 40,
    likeliest: str | None = None,
    optimizer: OptimizerConfig | None = None,
    guard: GuardConfig | None = None,
    name: str = "actor",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> AnyRole:
    """A role on the backend of its groups, or with a layout of Megatron on all ranks; options: fields of `ModelSpec`.

    Without an optimizer it cannot learn.
    """
    context = context or job_context()
    if isinstance(groups, str):
        groups = ParallelGroups(Placement.on(Layout.parse(groups), dist.get_world_size()))
    head = {"head": kind.head, "hidden_offset": kind.hidden_offset, "keeps_multi_token": kind.keeps_multi_token}
    spec = ModelSpec(model, dtype, **{"trained": optimizer is not None} | head | options)
    parts: Any = (FsdpRunner, FsdpTrainer) if isinstance(groups, MeshGroups) else (MegatronRunner, MegatronTrainer)
    runner = parts[0](spec, groups, context.directories, context.timer)
    arguments = [runner, Batching(temperature, tokens_per_micro_batch, likeliest=likeliest), name, context]
    if issubclass(kind, TrainableRole):
        arguments.append(parts[1](runner, optimizer, guard, name) if optimizer else None)
    return kind(*arguments)
