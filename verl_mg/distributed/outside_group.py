"""Process groups of ranks of the job and processes outside of it, such as inference servers.

The members meet in a store on one rank of the job. `new_group` takes only ranks of the job; these groups are made as
SGLang's `init_custom_process_group` makes them, so that either side can be a process of SGLang.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, distributed_c10d

from verl_mg.errors import UserError


class Rendezvous:
    """A store on this rank, at a free port of one network interface, in which the members of a new group meet."""

    def __init__(self, address: str, timeout: timedelta) -> None:
        self.address, self.name = address, f"verl_mg-{uuid.uuid4().hex}"
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # Bound to one interface, and passed on: TCPStore itself would listen on all of them.
        listener = socket.create_server((address, 0), family=family, backlog=1024)
        self.port = listener.getsockname()[1]
        self.store = TCPStore(
            address, self.port, is_master=True, wait_for_workers=False, timeout=timeout,
            master_listen_fd=listener.detach(),
        )  # fmt: skip


def connect_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Returns a connection to the store of a `Rendezvous` on another rank."""
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def join_outside_group(
    store: Store, name: str, rank: int, ranks: Sequence[int], backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Joins a process group of `ranks`, by which members are named in `dist.isend`; returns when all have joined."""
    group: Any
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        [],
        distributed_c10d.Backend(backend),
        PrefixStore(name, store),
        group_name=distributed_c10d.GroupName(name),
        timeout=timeout,
    )
    # torch's helper leaves out what `new_group` notes for it: how numbers of members become ranks of the group.
    distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    joined: dist.ProcessGroup = group
    return joined


def connect_all(group: dist.ProcessGroup, device: torch.device) -> None:
    """Makes the connections of a new group; all members call it together."""
    # NCCL connects at the first operation, and the first one must not be a message between only some of the members.
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def all_true(group: dist.ProcessGroup, here: bool, device: torch.device) -> bool:
    """Returns whether something is true on all members; all of them call it together."""
    flag = torch.tensor([here], dtype=torch.int32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group)
    return bool(flag.item())


def local_address(urls: Sequence[str]) -> str:
    """Returns the address under which servers reach this machine: loopback only where all URLs are."""
    addresses = [_interface_address(url) for url in urls]
    return next((address for address in addresses if not address.startswith("127.")), addresses[0])


def _interface_address(url: str) -> str:
    """Returns the address of the interface through which packets to the server leave; no packet is sent."""
    parts = urlsplit(url)
    try:
        resolved = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = resolved[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"{url}: the job's first rank finds no route to it ({error}), which rollout.weight_transfer=process_group "
            "needs. Write rollout.weight_transfer=disk, or an address that every machine knows."
        ) from None
