"""Megatron's process groups for one placement, switched on while a role runs.

megatron-core keeps its groups in the globals of `parallel_state`. Each role may have its own layout, so the
globals are built once a placement, kept here, and put in place around the role's work. megatron-core takes the ranks
of a model for all there are: while it makes groups and optimizers, it is told of the placement's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from verl_mg.layout import Coordinates, Layout, Placement


@dataclass(frozen=True)
class Cut:
    """How the token axis of a micro-batch is cut: into `context` runs, and outside attention each into tp parts.

    tp_index, context_index: which of them are this rank's. group: of the ranks that share a micro-batch.
    """

    tp: int
    context: int
    tp_index: int = 0
    context_index: int = 0
    group: dist.ProcessGroup | None = None


class ParallelGroups:
    """The process groups of a placement, whose ranks rise; every rank of the job builds it at the same time.

    collection: of this rank's groups; without any on a rank that is not `present`. host_group: of all ranks of the
    placement, for messages in host memory; None where these are all of the job. short_contexts: whether fewer than all
    context-parallel ranks may share a micro-batch, see `cut`.
    """

    def __init__(self, placement: Placement, seed: int = 0, dynamic_cp: bool = False) -> None:
        if list(placement.ranks) != sorted(placement.ranks):
            raise ValueError(f"torch numbers the ranks of a group by their size: {placement.ranks} must rise")
        self.placement = placement
        self._at = placement.coordinates(dist.get_rank())
        self.collection = ProcessGroupCollection()
        self.host_group = _host_group(placement)
        outer = _globals()
        _set_globals(dict.fromkeys(outer, None) | {"_HYBRID_DP_CP_GROUPS": {}})
        try:
            _make_groups(placement)
            if self.is_member:
                tensor_parallel.random.model_parallel_cuda_manual_seed(seed)
                self.collection = ProcessGroupCollection.use_mpu_process_groups()
            self._own = _globals()
        finally:
            _set_globals(outer)
        self.dynamic_cp = dynamic_cp
        self._contexts = {placement.layout.cp: getattr(self.collection, "cp", None)}
        if dynamic_cp:
            self._contexts |= _short_contexts(placement)

    def cut(self, context: int) -> Cut:
        """For a micro-batch of `context` neighbouring context-parallel ranks, of a number that divides cp."""
        at = self.coordinates
        return Cut(self.layout.tp, context, at.tp, at.cp % context, self._contexts[context])

    @property
    def layout(self) -> Layout:
        """The layout of the placement."""
        return self.placement.layout

    @property
    def is_member(self) -> bool:
        """Whether this rank is one of the placement's."""
        return self._at is not None

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank stands. Raises LookupError where it is not `present`."""
        if self._at is None:
            raise LookupError(f"rank {dist.get_rank()} has no place in layout {self.layout} on {self.placement.ranks}")
        return self._at

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, `parallel_state` speaks of this placement."""
        outer = _globals()
        _set_globals(self._own)
        try:
            yield
        finally:
            self._own = _globals()
            _set_globals(outer)

    def placement_as_world(self) -> AbstractContextManager[None]:
        """Inside, collectives of objects that name no group are those of the placement's ranks."""
        gather, whole = dist.all_gather_object, self.collection.intra_dist_opt

        def gather_here(objects: list[Any], own: Any, group: dist.ProcessGroup | None = None) -> None:
            gather(objects, own, whole if group is None else group)

        return _replaced(dist, get_world_size=_size_of(self.placement.ranks), all_gather_object=gather_here)


def _host_group(placement: Placement) -> dist.ProcessGroup | None:
    if len(placement.ranks) == dist.get_world_size():
        return None
    return dist.new_group(list(placement.ranks), backend="gloo")


def _short_contexts(placement: Placement) -> dict[int, dist.ProcessGroup]:
    """For each divisor of cp the group of so many neighbours that this rank is in."""
    layout, own = placement.layout, {}
    for context in (size for size in range(1, layout.cp) if layout.cp % size == 0):
        starts = range(0, layout.cp, context)
        for pp, dp, tp, start in product(range(layout.pp), range(layout.dp), range(layout.tp), starts):
            members = [placement.ranks[layout.rank_of(tp, start + i, dp, pp)] for i in range(context)]
            group = dist.new_group(members)
            if dist.get_rank() in members:
                own[context] = group
    return own


def _make_groups(placement: Placement) -> None:
    layout = placement.layout

    class Generator(parallel_state.RankGenerator):
        """Numbers the ranks of the layout as the job does."""

        def get_ranks(self, token: str) -> list[list[int]]:
            return [[placement.ranks[index] for index in group] for group in super().get_ranks(token)]

    size = _size_of(placement.ranks)
    with _replaced(dist, get_world_size=size), _replaced(parallel_state, RankGenerator=Generator):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
        )


def _size_of(ranks: Sequence[int]) -> Callable[..., int]:
    """`get_world_size`, for which these ranks are the world."""
    size_of = dist.get_world_size
    return lambda group=None: len(ranks) if group is None else size_of(group)


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Inside, the owner's attributes have these values."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)


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
