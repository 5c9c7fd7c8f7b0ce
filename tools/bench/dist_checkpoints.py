"""Weights and optimizer of a role in checkpoints of megatron-core that can be read under any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from torch import Tensor

from verl_mg.job.job import RunningJob
from verl_mg.megatron.model_runner import MegatronRunner
from verl_mg.megatron.trainer import optimizer_calls
from verl_mg.roles.models import TrainableRole


class DistCheckpoints:
    """Calls `dist_checkpointing` as Megatron-LM does; all ranks call the methods together."""

    def __init__(self, role: TrainableRole, asynchronous: bool = False, memory_efficient: bool = False) -> None:
        self._asynchronous, self._queue = asynchronous, AsyncCallsQueue()
        self._metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": memory_efficient,
            "chained_optim_avoid_prefix": True,
        }
        among = _megatron(role).groups.collection.dp_cp
        self._strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), among)

    def begin(self, job: RunningJob, folder: Path) -> None:
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        with _megatron(job.actor).groups.active(), optimizer_calls():
            state = self._state(job.actor, loading=False)
            # "nvrx" needs a package for GPUs.
            request = dist_checkpointing.save(
                state, str(folder), self._strategy, async_sharded_save=self._asynchronous, async_strategy="mcore"
            )
        if request is not None:
            self._queue.schedule_async_request(request)

    def finish(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)

    def load(self, job: RunningJob, folder: Path) -> None:
        runner, optimizer = _megatron(job.actor), job.actor.trainer.optimizer
        strategy = FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(str(folder)), runner.groups.collection.dp_cp
        )
        with runner.groups.active(), optimizer_calls():
            job.actor.trainer.allocate_moments()  # it cannot say how many steps were taken before the first
            state = dist_checkpointing.load(self._state(job.actor, loading=True), str(folder), strategy)
            runner.chunks[0].load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

    def _state(self, role: TrainableRole, loading: bool) -> dict[str, Any]:
        runner = _megatron(role)
        metadata = self._metadata | {"dp_cp_group": runner.groups.collection.dp_cp}
        model = runner.chunks[0].sharded_state_dict(metadata=metadata)
        optimizer = role.trainer.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}


def _megatron(role: TrainableRole) -> MegatronRunner:
    assert isinstance(role.runner, MegatronRunner)
    return role.runner


def adapt(optimizer: Any) -> None:
    """Let a distributed optimizer save and load itself `fully_reshardable` without a GPU.

    It has no gloo group, though its data-parallel group is one. Adam of torch counts steps for each weight: loading
    sets them all from one count, and then looks for them among the tensors to copy.
    """
    optimizer.data_parallel_group_gloo = optimizer.data_parallel_group
    copy = optimizer._set_main_param_and_optimizer_states

    def copy_all_but_steps(weight: Tensor, tensors: dict[str, Tensor]) -> None:
        copy(weight, tensors | {"step": optimizer._get_main_param_and_optimizer_states(weight)["step"]})

    optimizer._set_main_param_and_optimizer_states = copy_all_but_steps
