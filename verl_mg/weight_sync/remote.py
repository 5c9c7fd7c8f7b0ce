"""Weight sync from the actor to SGLang servers outside the job: what all ways have in common, and shared folders."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from verl_mg.distributed.collectives import all_gather_json
from verl_mg.engines.engine import EngineDiedError
from verl_mg.http_client import RefusedError, UnreachableError
from verl_mg.layout import EngineLayout
from verl_mg.servers.remote_engine import RemoteEngine
from verl_mg.weight_sync.policy import Policy

SENDER = 0
"""Rank of the job that does what only one rank does: stores, folders, broadcasts, messages."""


@dataclass(frozen=True)
class ServerView:
    """A running server, as all ranks see it."""

    number: int
    leader: int
    """Rank that sends its requests."""
    url: str
    start: str
    """Id of its start: a restarted server has another one, and no weights."""
    layout: str
    """Its parallel sizes."""
    nodes: int
    shard_obstacle: str
    """Reason why its ranks cannot receive their shards; empty where they can."""

    @property
    def ranks(self) -> int:
        """Number of ranks of the server."""
        return EngineLayout.parse(self.layout).ranks


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


def gather_views(engines: Mapping[int, RemoteEngine]) -> list[ServerView]:
    """Returns the servers of all ranks, sorted by number, from each rank's own; all ranks call it together."""
    rank = dist.get_rank()
    mine = [
        asdict(ServerView(number, rank, engine.url, info.start, info.layout, info.nodes, info.shard_obstacle))
        for number, engine in engines.items()
        for info in (engine.info,)
    ]
    views = [ServerView(**fields) for report in all_gather_json(mine) for fields in report]
    return sorted(views, key=lambda view: view.number)


@dataclass(frozen=True)
class SyncResult:
    """Result of a transfer: bytes and seconds as metrics, the same on all ranks but for the seconds."""

    metrics: dict[str, float]
    lost: frozenset[int] = frozenset()
    """Numbers of servers that were lost in the transfer; then no server has the weights for certain."""


class RemoteWeightSync(Protocol):
    """Transfer of weights to servers; all ranks call it together."""

    def transfer(self, actor: Policy, engines: Mapping[int, RemoteEngine], servers: Sequence[ServerView]) -> SyncResult:
        """Transfers the actor's weights to some servers; others continue to generate.

        Args:
            actor: has the weights.
            engines: servers that this rank leads, by number.
            servers: those that receive weights; the same on all ranks.
        """
        ...


class SharedFolderSync:
    """Transfer through a Hugging Face directory that all ranks write their parts of, and that the servers then load."""

    # `folder` is only of this job: directories of older versions in it are removed. Configuration and tokenizer are
    # copied from `model_dir`.

    def __init__(self, folder: Path, model_dir: Path) -> None:
        self._folder, self._model_dir = folder.resolve(), model_dir
        self._written = -1

    def transfer(self, actor: Policy, engines: Mapping[int, RemoteEngine], servers: Sequence[ServerView]) -> SyncResult:
        """Writes the actor's weights, unless they are in the folder, and has the servers load them."""
        started = time.perf_counter()
        weights = self._folder / f"weights-{actor.num_updates}"
        if actor.num_updates != self._written:  # a server that joins later loads the directory that is there
            actor.save(weights, self._model_dir)
            self._written = actor.num_updates
        saved = time.perf_counter()
        lost = []
        for view in servers:
            if view.number in engines:
                try:
                    engines[view.number].load_folder(weights, actor.num_updates)
                except EngineDiedError:
                    lost.append(view.number)
        all_lost = frozenset(number for rank in all_gather_json(lost) for number in rank)
        # Only after the exchange: then no server still loads an older directory.
        if dist.get_rank() == SENDER:
            for old in set(self._folder.glob("weights-*")) - {weights}:
                shutil.rmtree(old)
        now = time.perf_counter()
        return SyncResult(
            {
                "time/weight_sync": now - started,
                "time/weight_sync_writing": saved - started,
                "time/weight_sync_loading": now - saved,
            },
            all_lost,
        )
