"""Megatron's process groups for one layout, switched on while a role runs.

megatron-core keeps its groups in the globals of `parallel_state`. Each role may have its own layout, so the
globals are built once a layout, kept here, and put in place around the role's work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from verl_mg.layout import Coordinates, Layout


class ParallelGroups:
    """The process groups of one layout over all ranks of the job; every rank builds it at the same time."""

    def __init__(self, layout: Layout, seed: int = 0) -> None:
        self.layout = layout
        self.coordinates: Coordinates = layout.coordinates(dist.get_rank())
        outer = _globals()
        _set_globals(dict.fromkeys(outer, None) | {"_HYBRID_DP_CP_GROUPS": {}})
        try:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                create_gloo_process_groups=False,
            )
            tensor_parallel.random.model_parallel_cuda_manual_seed(seed)
            self.collection = ProcessGroupCollection.use_mpu_process_groups()
            self._own = _globals()
        finally:
            _set_globals(outer)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, `parallel_state` speaks of this layout."""
        outer = _globals()
        _set_globals(self._own)
        try:
            yield
        finally:
            self._own = _globals()
            _set_globals(outer)


def _globals() -> dict[str, Any]:
    # Left in place, its list of all groups would keep those of every layout, and their threads, for ever.
    every_group = "_global_process_group_list"
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if (name.startswith("_") and name.isupper()) or name == every_group
    }


def _set_globals(values: dict[str, Any]) -> None:
    vars(parallel_state).update(values)
