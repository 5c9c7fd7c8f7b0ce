"""A process group of one rank of the job, which sends, and the ranks of servers, which are no part of the job."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore, distributed_c10d

from verl_mg.errors import UserError

JOIN_TIMEOUT = timedelta(minutes=10)


class GroupRendezvous:
    """Where a group meets: a store on this rank at a port that is free, under a name that no server knows yet."""

    def __init__(self, address: str) -> None:
        self.address, self.name = address, f"verl_mg-{uuid.uuid4().hex}"
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=JOIN_TIMEOUT)
        self.port = self._store.port

    def join(self, ranks: int, backend: str) -> RemoteProcessGroup:
        """Be rank 0 of `ranks`; returns when the others have joined."""
        # As SGLang's `init_custom_process_group` does it on the other side; `new_group` takes only ranks of the job.
        group, _ = distributed_c10d._new_process_group_helper(
            ranks,
            0,
            [],
            distributed_c10d.Backend(backend),
            PrefixStore(self.name, self._store),
            group_name=distributed_c10d.GroupName(self.name),
            timeout=JOIN_TIMEOUT,
        )
        distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(ranks)}
        return RemoteProcessGroup(self._store, group)


class RemoteProcessGroup:
    """The group on the sending rank, which also keeps its store."""

    def __init__(self, store: TCPStore, group: dist.ProcessGroup) -> None:
        self._store, self._group = store, group

    def send(self, flat: Tensor) -> dist.Work:
        """Begin to send to all others, which take a tensor of the same size."""
        return self._group.broadcast(flat, 0)

    def close(self) -> None:
        """Leave it."""
        dist.destroy_process_group(self._group)


def address_for(urls: Sequence[str]) -> str:
    """The address under which the servers reach this machine: loopback only if all URLs are. UserError: no way."""
    addresses = [_own_address(url) for url in urls]
    return next((address for address in addresses if not address.startswith("127.")), addresses[0])


def _own_address(url: str) -> str:
    """Of the interface through which packets to the server go out; none is sent."""
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, there = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"{url}: the job's first rank finds no way to it ({error}), which "
            "rollout.weight_transfer=process_group needs; write "
            "rollout.weight_transfer=disk, or an address that every machine knows"
        ) from None
