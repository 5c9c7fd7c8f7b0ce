"""Process groups of a placement of the FSDP backend, and the device mesh of its parameters.

rank = tp + TP * (cp + CP * dp)        as in Megatron's dense grid, without pipeline stages
mesh    replicate   copies of the model, each on its part of the data-parallel ranks (HSDP)
        shard       ranks that divide a copy's parameters: the data-parallel ranks of a copy, and their cp ranks
        tp          tensor-parallel ranks

dp4 with 2 replicas: copies on the ranks 0 1 and 2 3; groups shard 0 1, 2 3; groups replicate 0 2, 1 3
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from verl_mg import device
from verl_mg.distributed.collectives import ProcessGroups
from verl_mg.errors import UserError
from verl_mg.layout import Layout, Placement
from verl_mg.layout.layout import smaller_cp_groups
from verl_mg.training.microbatch import TokenShard
from verl_mg.training.runner import RoleGroups


@dataclass(frozen=True)
class TensorRanks:
    """Ranks that divide the tensors of a module."""

    index: int = 0  # this rank's index among them
    count: int = 1
    group: dist.ProcessGroup | None = None  # None for one rank


REPLICATE, SHARD, TENSOR = "replicate", "shard", "tp"  # names of the mesh's dimensions


class MeshGroups(RoleGroups):
    """Process groups of a placement, see `RoleGroups`.

    Attributes:
        replicas: copies of the model.
        ranks: (replicas, sharding ranks, tp) int64, the ranks of the placement.
        group: all ranks of the placement.
        mesh: mesh of the parameters, with the dimensions of more than one rank and `shard`; None outside the placement.
    """

    def __init__(
        self,
        placement: Placement,
        replicas: int = 1,
        dynamic_cp: bool = False,
        process_groups: ProcessGroups | None = None,
    ) -> None:
        check_mesh(placement.layout, replicas)
        self.replicas, self.ranks = replicas, rank_grid(placement, replicas)
        dims = [dim for dim, size in enumerate(self.ranks.shape) if size > 1 or dim == 1]
        of_dims = [list(map(tuple, self.ranks.movedim(dim, -1).flatten(0, -2).tolist())) for dim in dims]
        sharing = list(_cp_ranks(placement, dynamic_cp))
        super().__init__(placement, [*chain(*of_dims), *sharing, placement.ranks], dynamic_cp, process_groups)
        self.group = self._made[placement.ranks]
        self._cp_groups = self._groups_here(sharing)
        self.mesh: DeviceMesh | None = None
        if self.is_member:
            groups = [group for sets in of_dims for group in self._groups_here(sets).values()]
            kept = self.ranks.reshape([self.ranks.shape[dim] for dim in dims])
            names = tuple((REPLICATE, SHARD, TENSOR)[dim] for dim in dims)
            kind, single = device.current_device().type, len(dims) == 1
            self.mesh = DeviceMesh.from_group(groups[0] if single else groups, kind, kept, mesh_dim_names=names)

    @property
    def data_mesh(self) -> DeviceMesh:
        """Mesh over which parameters are sharded, and replicated where there are copies."""
        assert self.mesh is not None
        return self.mesh[REPLICATE, SHARD] if self.replicas > 1 else self.mesh[SHARD]

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """Mesh of the tensor-parallel ranks; None with tp1."""
        assert self.mesh is not None
        return self.mesh[TENSOR] if self.layout.tp > 1 else None

    @property
    def tensor_ranks(self) -> TensorRanks:
        """The tensor-parallel ranks of this rank."""
        mesh = self.tensor_mesh
        return TensorRanks() if mesh is None else TensorRanks(self.coordinates.tp, self.layout.tp, mesh.get_group())

    def token_shard(self, cp_size: int) -> TokenShard:
        """Returns this rank's part of a micro-batch that `cp_size` neighbouring ranks share; it divides cp."""
        # Tensor-parallel ranks have the same tokens: there is no sequence parallelism.
        return TokenShard(1, cp_size, 0, self.coordinates.cp % cp_size, self._cp_groups.get(cp_size))


def _cp_ranks(placement: Placement, dynamic_cp: bool) -> Iterator[tuple[int, ...]]:
    layout = placement.layout
    if layout.cp == 1:
        return
    yield from map(tuple, torch.tensor(placement.ranks).view(-1, layout.cp, layout.tp).mT.flatten(0, 1).tolist())
    # With dynamic context fewer neighbouring ranks may share a micro-batch.
    for ranks in smaller_cp_groups(layout) if dynamic_cp else ():
        if len(ranks) > 1:
            yield tuple(placement.ranks[index] for index in ranks)


def rank_grid(placement: Placement, replicas: int) -> torch.Tensor:
    """Returns the ranks of a placement, int64 (replicas, sharding ranks, tp); replicas divide dp."""
    return torch.tensor(placement.ranks).view(replicas, -1, placement.layout.tp)


def check_mesh(layout: Layout, replicas: int) -> None:
    """Checks that the FSDP backend has the dimensions of a layout, and that as many copies fit."""
    for key, size in (("pp", layout.pp), ("ep", layout.ep), ("etp", layout.etp if layout.etp != layout.tp else 1)):
        if size > 1:
            raise UserError(f"layout {layout}: {key}{size} is not possible with backend: fsdp. Leave out {key}{size}.")
    if layout.dp % replicas:
        raise UserError(
            f"fsdp.replicas={replicas}: it does not divide the {layout.dp} data-parallel ranks of layout {layout}. "
            "Choose a divisor."
        )
