"""Megatron's process groups of one placement.

megatron-core keeps its process groups in module globals of `megatron.core.parallel_state`, one set for a process. Here
each role may have another layout on other ranks, so these are replaced for a limited time, and nothing else:

- The globals of `parallel_state`, such as `_TENSOR_MODEL_PARALLEL_GROUP`. `ParallelGroups` builds one set for its
  placement with `initialize_model_parallel`, stores it, and restores the previous globals. `ParallelGroups.active()`
  puts the stored set in place while a role computes; on exit the set is stored again and the previous globals are
  restored, also after an exception.
- `torch.distributed.get_world_size`, `new_group` and `parallel_state.RankGenerator`, only during
  `initialize_model_parallel`: megatron-core divides the whole job among the groups, and a placement may cover only some
  of its ranks, in another order. The groups come from `ProcessGroups`, each made once in a job: many kinds of group
  have the same ranks.
- `torch.distributed.get_world_size` and `all_gather_object` without a group, only inside `placement_as_world()`, which
  the trainer enters to build the distributed optimizer: it exchanges metadata among all ranks of the job, and the ranks
  outside the placement do not take part.

Only the calling thread may use megatron-core meanwhile; no other thread of this package does. A role's set over time:

    stored --active()--> in `parallel_state` --exit--> stored again, with what megatron-core changed inside
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from verl_mg.distributed.collectives import ProcessGroups
from verl_mg.layout import Placement
from verl_mg.layout.layout import group_ranks, smaller_cp_groups
from verl_mg.megatron.core_version import MEGATRON, group_globals, ranks_in_groups, set_group_globals
from verl_mg.training.microbatch import TokenShard
from verl_mg.training.runner import RoleGroups


class ParallelGroups(RoleGroups):
    """Process groups of a placement, see `RoleGroups`.

    Attributes:
        collection: this rank's groups; empty on a rank outside the placement.
    """

    def __init__(
        self,
        placement: Placement,
        seed: int = 0,
        dynamic_cp: bool = False,
        process_groups: ProcessGroups | None = None,
    ) -> None:
        if list(placement.ranks) != sorted(placement.ranks):
            raise ValueError(f"torch numbers the ranks of a group in increasing order: {placement.ranks} is not")
        super().__init__(placement, group_ranks(placement, dynamic_cp), dynamic_cp, process_groups)
        self.collection = ProcessGroupCollection()
        previous = group_globals()
        set_group_globals(dict.fromkeys(previous, None) | {"_HYBRID_DP_CP_GROUPS": {}})
        try:
            _initialize_model_parallel(placement, self._made)
            if self.is_member:
                tensor_parallel.random.model_parallel_cuda_manual_seed(seed)
                self.collection = ProcessGroupCollection.use_mpu_process_groups()
            self._stored = group_globals()
        finally:
            set_group_globals(previous)
        neighbours = smaller_cp_groups(placement.layout) if dynamic_cp else ()
        sharing = (tuple(placement.ranks[index] for index in ranks) for ranks in neighbours)
        self._cp_groups = {placement.layout.cp: getattr(self.collection, "cp", None)} | self._groups_here(sharing)

    def token_shard(self, cp_size: int) -> TokenShard:
        """Returns this rank's part of a micro-batch that `cp_size` neighbouring ranks share; it divides cp."""
        at = self.coordinates
        return TokenShard(self.layout.tp, cp_size, at.tp, at.cp % cp_size, self._cp_groups[cp_size])

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context manager: `parallel_state` returns the groups of this placement inside."""
        previous = group_globals()
        set_group_globals(self._stored)
        try:
            yield
        finally:
            self._stored = group_globals()
            set_group_globals(previous)

    def placement_as_world(self) -> AbstractContextManager[None]:
        """Context manager: object collectives without a group cover the placement's ranks only."""
        gather, all_members = dist.all_gather_object, self.collection.intra_dist_opt

        def gather_members(objects: list[Any], local: Any, group: dist.ProcessGroup | None = None) -> None:
            gather(objects, local, all_members if group is None else group)

        size = _world_size_of(self.placement.ranks)
        return MEGATRON.replaced(dist, get_world_size=size, all_gather_object=gather_members)


def _initialize_model_parallel(placement: Placement, made: Mapping[tuple[int, ...], Any]) -> None:
    """Has megatron-core distribute the groups that were made, by their ranks, among its globals."""
    layout = placement.layout

    def group_of(ranks: Sequence[int], **_: Any) -> Any:
        # torch numbers the ranks of a group in increasing order, whatever the order of the request.
        group = made[tuple(sorted(ranks))]
        return dist.GroupMember.NON_GROUP_MEMBER if group is None else group

    size = _world_size_of(placement.ranks)
    with MEGATRON.replaced(dist, get_world_size=size, new_group=group_of), ranks_in_groups(placement.ranks):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
        )


def _world_size_of(ranks: Sequence[int]) -> Callable[..., int]:
    """Returns a `get_world_size` for which the given ranks are the world."""
    get_world_size = dist.get_world_size
    return lambda group=None: len(ranks) if group is None else get_world_size(group)
