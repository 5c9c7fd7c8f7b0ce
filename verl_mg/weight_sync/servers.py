"""Base of the transports of weights to SGLang servers outside the job.

A transport is a file with one class that implements `ServerTransport`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from verl_mg import device
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.distributed.outside_group import Rendezvous, local_address
from verl_mg.errors import UserError
from verl_mg.http_client import RefusedError, UnreachableError
from verl_mg.layout import EngineLayout
from verl_mg.servers.remote_engine import RemoteEngine
from verl_mg.weight_sync.transfer_plan import SourceWeights

SENDER = 0
"""Rank of the job that does what only one rank does: stores, folders, broadcasts, messages."""


@dataclass(frozen=True)
class ServerView:
    """A running server, as all ranks see it."""

    number: int
    url: str
    start: str
    """Id of its start: a restarted server has another one, and no weights."""
    layout: str
    """Its parallel sizes."""
    shard_obstacle: str
    """Reason why its ranks cannot receive their shards; empty where they can."""

    @property
    def ranks(self) -> int:
        """Number of ranks of the server."""
        return EngineLayout.parse(self.layout).ranks


@dataclass(frozen=True)
class SyncResult:
    """Result of a transfer: bytes and seconds as metrics, the same on all ranks but for the seconds."""

    metrics: dict[str, float]
    lost: frozenset[int] = frozenset()
    """Numbers of servers that were lost in the transfer; then no server has the weights for certain."""


Engines = Mapping[int, RemoteEngine]
"""Servers that a rank leads, by number."""
Servers = Sequence[ServerView]
"""Servers that receive weights; the same on all ranks."""


class ServerTransport(Protocol):
    """Transfer of weights to servers; all ranks call it together."""

    def transfer(self, weights: SourceWeights, engines: Engines, servers: Servers) -> SyncResult:
        """Transfers weights to some servers; others continue to generate."""
        ...


def gather_views(engines: Engines) -> list[ServerView]:
    """Returns the servers of all ranks, sorted by number, from each rank's own; all ranks call it together."""
    mine = [
        asdict(ServerView(number, engine.url, engine.info.start, engine.info.layout, engine.info.shard_obstacle))
        for number, engine in engines.items()
    ]
    views = [ServerView(**fields) for report in all_gather_json(mine) for fields in report]
    return sorted(views, key=lambda view: view.number)


def wait_for_servers(
    updates: Mapping[ServerView, Future[None]],
) -> tuple[list[ServerView], list[str], list[int]]:
    """Waits for this rank's servers; returns those that have done the update, refusals, and numbers of lost servers."""
    done: list[ServerView] = []
    problems: list[str] = []
    lost: list[int] = []
    for view, update in updates.items():
        try:
            update.result()
        except UnreachableError:
            lost.append(view.number)
        except RefusedError as error:
            problems.append(f"{view.url}: {error}")
        else:
            done.append(view)
    return done, problems, lost


def all_lost(numbers: Iterable[int]) -> frozenset[int]:
    """Returns the servers that any rank has lost, from each rank's numbers; all ranks call it together."""
    return frozenset(number for rank in all_gather_json(sorted(numbers)) for number in rank)


@dataclass(frozen=True)
class Meeting:
    """Meeting point of the job and some servers for a process group."""

    members: Sequence[tuple[int, str]]
    """Number and start of each server."""
    name: str
    address: str
    port: int
    backend: Literal["nccl", "gloo"]
    rendezvous: Rendezvous | None
    """On the rank that has the store."""

    @classmethod
    def arrange(cls, servers: Servers, timeout: timedelta) -> Meeting:
        """Makes a store for a new group; all ranks call it together."""
        rendezvous = None
        if dist.get_rank() == SENDER:
            rendezvous = Rendezvous(local_address([view.url for view in servers]), timeout)
        where = [rendezvous.name, rendezvous.address, rendezvous.port] if rendezvous else []
        name, address, port = all_gather_json(where)[SENDER]
        # GPU: the group of the job and the servers is NCCL's.
        # GPU-TEST: tests/weight_sync/test_transports.py::test_servers_receive_every_value_through_restarts_and_losses
        # GPU-RAN: not yet
        backend: Literal["nccl", "gloo"] = "nccl" if device.current_device().type == "cuda" else "gloo"
        return cls([(view.number, view.start) for view in servers], name, address, port, backend, rendezvous)

    def is_of(self, servers: Servers) -> bool:
        """Returns whether it is with these servers, which have not been restarted since."""
        return self.members == [(view.number, view.start) for view in servers]


def no_connection(error: Exception) -> UserError:
    """Returns the error for a job and servers that NCCL cannot connect."""
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return UserError(
        f"rollout.weight_transfer=process_group: NCCL {version} cannot connect the job and the servers "
        f"({error}). Start them with one version of NCCL and one value of NCCL_CUMEM_ENABLE, or write "
        "rollout.weight_transfer=disk."
    )
