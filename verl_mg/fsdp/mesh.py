"""Process groups of a placement of the FSDP backend, and the device mesh of its parameters.

rank = tp + TP * (cp + CP * dp)        as in Megatron's dense grid, without pipeline stages
mesh    replicate   copies of the model, each on its part of the data-parallel ranks (HSDP)
        shard       ranks that divide a copy's parameters: the data-parallel ranks of a copy, and their cp ranks
        tp          tensor-parallel ranks

dp4 with 2 replicas: copies on the ranks 0 1 and 2 3; groups shard 0 1, 2 3; groups replicate 0 2, 1 3
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from verl_mg import device
from verl_mg.distributed.collectives import ProcessGroups
from verl_mg.errors import UserError
from verl_mg.layout import Layout, Placement
from verl_mg.layout.layout import divisors, smaller_cp_groups
from verl_mg.training.microbatch import TokenShard

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tp"  # names of the mesh's dimensions


class MeshGroups:
    """Process groups of a placement; every rank of the job constructs them at the same time.

    Attributes:
        placement: the ranks and their layout.
        replicas: copies of the model.
        host_group: all ranks of the placement, for messages in host memory; None where these are all ranks of the job.
        dynamic_cp: whether fewer than all context-parallel ranks may share a micro-batch, see `token_shard`.
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
        self.placement, self.replicas, self.dynamic_cp = placement, replicas, dynamic_cp
        self.coordinates = placement.coordinates(dist.get_rank())
        process_groups, backend = process_groups or ProcessGroups(), device.group_backend()
        layout, rank = placement.layout, dist.get_rank()
        self.ranks = rank_grid(placement, replicas)
        groups: list[dist.ProcessGroup] = []
        # A collective of all ranks of the job: every rank requests every group, in the same order.
        for dim in self._dims():
            for ranks in self.ranks.movedim(dim, -1).flatten(0, -2).tolist():
                group = process_groups.of(ranks, backend)
                groups += [group] if group is not None else []
        self._cp_groups: dict[int, dist.ProcessGroup] = {}
        for ranks in self._cp_ranks(layout):
            group = process_groups.of(ranks, backend)
            if rank in ranks and group is not None:
                self._cp_groups[len(ranks)] = group
        is_whole_job = len(placement.ranks) == dist.get_world_size()
        self.host_group = None if is_whole_job else process_groups.of(placement.ranks, "gloo")
        self.group = process_groups.of(placement.ranks, backend)
        self.mesh: DeviceMesh | None = None
        if self.is_member:
            dims = self._dims()
            kept = self.ranks.reshape([self.ranks.shape[dim] for dim in dims])
            names = tuple((REPLICATE, SHARD, TENSOR)[dim] for dim in dims)
            kind, single = device.current_device().type, len(dims) == 1
            self.mesh = DeviceMesh.from_group(groups[0] if single else groups, kind, kept, mesh_dim_names=names)

    @property
    def layout(self) -> Layout:
        """Parallel sizes of the placement."""
        return self.placement.layout

    @property
    def is_member(self) -> bool:
        """True on the ranks of the placement."""
        return self.coordinates is not None

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
    def tensor_group(self) -> dist.ProcessGroup | None:
        """Group of the tensor-parallel ranks; None with tp1."""
        return self.tensor_mesh.get_group() if self.tensor_mesh is not None else None

    def token_shard(self, cp_size: int) -> TokenShard:
        """Returns this rank's part of a micro-batch that `cp_size` neighbouring ranks share; it divides cp."""
        assert self.coordinates is not None
        # Tensor-parallel ranks have the same tokens: there is no sequence parallelism.
        return TokenShard(1, cp_size, 0, self.coordinates.cp % cp_size, self._cp_groups.get(cp_size))

    def _dims(self) -> list[int]:
        return [dim for dim, size in enumerate(self.ranks.shape) if size > 1 or dim == 1]

    def _cp_ranks(self, layout: Layout) -> Iterator[tuple[int, ...]]:
        if layout.cp == 1:
            return
        for ranks in self.ranks.view(-1, layout.cp, layout.tp).movedim(1, -1).flatten(0, -2).tolist():
            yield tuple(ranks)
        # With dynamic context fewer neighbouring ranks may share a micro-batch.
        if self.dynamic_cp and divisors(layout.cp)[:-1] != [1]:
            for ranks in smaller_cp_groups(layout):
                if len(ranks) > 1:
                    yield tuple(self.placement.ranks[index] for index in ranks)


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
