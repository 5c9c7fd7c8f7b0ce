"""Weight sync to SGLang servers outside the job by changes in a shared folder, with whole directories where needed.

    FOLDER/changes-7/0.safetensors        what update 7 has changed, of the boxes that rank 0 sends
    FOLDER/changes-7/report-2-1.json      report of rank 1 of server 2
    FOLDER/weights-7                      all weights, for servers that do not have version 6

A folder is written under a temporary name and renamed. The one of a version is removed when the next one is complete:
then every server has it, or needs all weights.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from verl_mg.distributed.collectives import all_gather_json, sum_over_ranks
from verl_mg.engines.sglang.folder_receiver import FolderReport, FolderRequest
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.reshard import plan, schedule, split_into_chunks
from verl_mg.reshard.delta_files import Place, member_name, write_changes
from verl_mg.reshard.delta_transfer import SentValues
from verl_mg.reshard.plan import Plan
from verl_mg.servers.remote_engine import RemoteEngine
from verl_mg.sharding.boxes import Box, cut, intersect, numel, slices, translate_box
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.shard_map import JoinedShardMap
from verl_mg.weight_sync.engines import SourceChunk, chunk_sources
from verl_mg.weight_sync.policy import Policy
from verl_mg.weight_sync.remote import (
    SENDER,
    ServerView,
    SharedFolderSync,
    SyncResult,
    wait_for_servers,
)

CHUNK_BYTES = 2**30
"""Bytes of a server rank's weights of which the adapters are merged at a time."""
BOX_BYTES = 2**26
"""Bytes of a box that are compared at a time."""
# Longest wait for the report of a rank whose server has answered: a shared folder may show files late.
REPORT_SECONDS = 60.0
REPORT_POLL_SECONDS = 0.02

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Chunk(SourceChunk):
    """A part of the weights, with the places of the boxes that this rank writes."""

    places: Mapping[tuple[str, Box], Sequence[Place]]
    """Places in members, by parameter of this rank and box in it."""


@dataclass
class _Written:
    """State of this rank after it has written the weights of a version."""

    actor: Policy
    version: int
    layouts: tuple[str, ...]
    chunks: Sequence[_Chunk]
    """Boxes that this rank writes, in parts of the model."""
    bytes_of: Mapping[str, int]
    """Bytes of all weights of a server, by its layout; replicas count on each rank."""
    sent: Sequence[SentValues]


class FolderChangesSync:
    """Transfer in which each rank writes what the last update has changed in its boxes."""

    # A file has what each rank of a server needs, so servers need no tables. `folder` is only of this job: directories
    # of older versions in it are removed.

    def __init__(self, folder: Path, model_dir: Path, table: ModelTable) -> None:
        self._folder, self._table = folder.resolve(), table
        self._whole = SharedFolderSync(folder, model_dir)
        self._written: _Written | None = None
        self._held: dict[tuple[int, str], int] = {}
        """Policy version of each server, by its number and start."""

    def transfer(self, actor: Policy, engines: Mapping[int, RemoteEngine], servers: Sequence[ServerView]) -> SyncResult:
        """Has servers apply the changes; a server without the last version loads all weights instead."""
        started, version = time.perf_counter(), actor.num_updates
        current = self._prepare(actor, servers)
        counted, lost = {"weight_sync/bytes_written": 0, "weight_sync/bytes_received": 0}, list[int]()
        waiting = [view for view in current if self._held[view.number, view.start] != version]
        if self._written and self._written.version != version:
            counted["weight_sync/bytes_written"] = self._write(actor, version, write=bool(waiting))
        if waiting:
            lost, received = self._apply(engines, waiting, version)
            counted["weight_sync/bytes_received"] = received
        lost = [number for rank in all_gather_json(lost) for number in rank]
        # New servers, servers that have missed a version, and servers whose checksums differ.
        rest = [
            view for view in servers
            if view.number not in lost and self._held.get((view.number, view.start)) != version
        ]  # fmt: skip
        seconds: dict[str, float] = {}
        if rest:
            result = self._whole.transfer(actor, engines, rest)
            lost += result.lost
            seconds |= result.metrics
            if dist.get_rank() == SENDER:
                counted["weight_sync/bytes_written"] += _size(self._folder / f"weights-{version}")
            self._held |= {(view.number, view.start): version for view in rest if view.number not in result.lost}
        self._remove_old(version)
        assert self._written is not None
        metrics = sum_over_ranks([counted]) | seconds
        metrics["weight_sync/bytes_lower_bound"] = sum(self._written.bytes_of[view.layout] for view in servers)
        return SyncResult(metrics | {"time/weight_sync": time.perf_counter() - started}, frozenset(lost))

    def _prepare(self, actor: Policy, servers: Sequence[ServerView]) -> list[ServerView]:
        """Returns the servers that have the last version or this one; plans again for another actor or new layouts."""
        layouts = {view.layout for view in servers} | set(self._written.layouts if self._written else ())
        if not self._written or self._written.actor is not actor or set(self._written.layouts) != layouts:
            chunks, sizes = self._plan(actor, tuple(sorted(layouts)))
            sent = [SentValues() for _ in chunks]
            self._written = _Written(actor, -1, tuple(sorted(layouts)), chunks, sizes, sent)
            self._held.clear()
        versions = (self._written.version, actor.num_updates)
        return [view for view in servers if self._held.get((view.number, view.start)) in versions]

    def _write(self, actor: Policy, version: int, write: bool) -> int:
        """Writes the changes since the last version, or only copies the values; returns the bytes of this rank."""
        assert self._written is not None
        folder, size = self._folder / f"changes-{version}", 0
        unfinished = folder.with_name(folder.name + ".partial")
        if write and dist.get_rank() == SENDER:
            for old in (folder, unfinished):
                shutil.rmtree(old, ignore_errors=True)
            unfinished.mkdir(parents=True)
        dist.barrier()  # the folder exists
        changes = []
        for number, (chunk, tensors, wait_for) in enumerate(chunk_sources(actor, self._written.chunks)):
            sent = self._written.sent[number]
            if wait_for:
                for name in chunk.schedule.source_parameters:
                    wait_for(name)
            for (parameter, box), places in chunk.places.items() if write else ():
                changes.append((sent.encode(parameter, box, tensors[parameter].detach()[slices(box)]).cpu(), places))
            sent.keep(chunk.schedule, tensors)  # also without a reader: the next changes are relative to this version
        if changes:
            size = write_changes(unfinished / f"{dist.get_rank()}.safetensors", changes)
        dist.barrier()  # all files are written
        if write and dist.get_rank() == SENDER:
            unfinished.rename(folder)
        dist.barrier()  # a leader may now name the folder to its servers
        self._written.version = version
        return size

    def _apply(
        self, engines: Mapping[int, RemoteEngine], servers: Sequence[ServerView], version: int
    ) -> tuple[list[int], int]:
        """Has servers apply the changes; returns the lost servers of this rank, and the bytes that others have read."""
        folder = self._folder / f"changes-{version}"
        mine = [view for view in servers if view.number in engines]
        updates: dict[ServerView, tuple[FolderRequest, Future[None]]] = {}
        for view in mine:
            request = FolderRequest(folder=str(folder), layout=view.layout, server=view.number)
            updates[view] = request, engines[view.number].update_shards(request, version)
        done, problems, lost = wait_for_servers({view: update for view, (_, update) in updates.items()})
        intact, received = list[int](), 0
        for view in done:
            request = updates[view][0]
            reports = [_report(request.report_path(rank)) for rank in range(view.ranks)]
            received += sum(report.bytes_read for report in reports)
            problems += [f"{view.url}: {report.error}" for report in reports if report.error]
            if all(report.intact for report in reports):
                engines[view.number].confirm(version)
                intact.append(view.number)
        outcome = all_gather_json({"intact": intact, "problems": problems, "lost": lost})
        if refused := [text for rank in outcome for text in rank["problems"]]:
            raise UserError(
                f"rollout.weight_transfer=disk: a server has not applied the changes ({refused[0]}). See the server's "
                "log, or write rollout.delta=false."
            )
        confirmed = {number for rank in outcome for number in rank["intact"]}
        gone = {number for rank in outcome for number in rank["lost"]}
        for view in servers:
            if view.number in confirmed:
                self._held[view.number, view.start] = version
                continue
            del self._held[view.number, view.start]
            if view.number not in gone and dist.get_rank() == SENDER:
                log.warning("rollout: the weights of %s differ from those that were sent; it loads all", view.url)
        return lost, received

    def _remove_old(self, version: int) -> None:
        if dist.get_rank() == SENDER:
            for old in [*self._folder.glob("changes-*"), *self._folder.glob("weights-*")]:
                if old.name not in (f"changes-{version}", f"weights-{version}"):
                    shutil.rmtree(old)

    # -- the plan

    def _plan(self, actor: Policy, layouts: tuple[str, ...]) -> tuple[list[_Chunk], dict[str, int]]:
        """Plans one server of each layout; returns what this rank writes, and the bytes of all weights by layout."""
        # Servers follow the ranks of the job; a node has one rank, so none forwards. This covers servers that join
        # later.
        rank, first, dtype = dist.get_rank(), dist.get_world_size(), actor.runner.dtype
        placements: list[EnginePlacement] = []
        members: dict[int, str] = {}
        for layout in layouts:
            parsed = EngineLayout.parse(layout)
            placements.append(EnginePlacement(parsed, tuple(range(first, first + parsed.ranks))))
            members |= {first + number: member_name(layout, number) for number in range(parsed.ranks)}
            first += parsed.ranks
        maps = [self._table.shard_map_engine(placement) for placement in placements]
        target = maps[0] if len(maps) == 1 else JoinedShardMap(maps)
        chunks, sizes = [], dict.fromkeys(layouts, 0)
        for part in split_into_chunks(target, list(members), CHUNK_BYTES // dtype.itemsize):
            moves = plan(actor.runner.shard_map(), part, 1)  # 1 rank on a node: every box is written by its source
            places = _places(moves, rank, members, dtype)
            for layout, placement in zip(layouts, placements, strict=True):
                sizes[layout] += sum(moves.lower_bound(member, dtype.itemsize) for member in placement.ranks)
            chunks.append(_Chunk(schedule=schedule(moves, rank, dtype), places=places))
        return chunks, sizes


def _places(
    moves: Plan, rank: int, members: Mapping[int, str], dtype: torch.dtype
) -> Mapping[tuple[str, Box], Sequence[Place]]:
    """Returns where the boxes that a rank sends are in the members, which are ranks of servers by layout."""
    result: dict[tuple[str, Box], list[Place]] = defaultdict(list)
    received = {
        (member, move.tensor, move.box): move
        for member in members
        for move in moves.rank_plan(member).receives
        if move.peer == rank
    }
    for sent in moves.rank_plan(rank).sends:
        wire = moves.source.tensors[sent.tensor].wire_dtype(dtype)
        arrives = received[sent.peer, sent.tensor, sent.box]
        make = partial(Place, members[sent.peer], dtype=wire)
        for _, box in cut(sent.box, max(1, numel(sent.box) * wire.itemsize // BOX_BYTES)):
            places = result[sent.parameter, translate_box(box, sent.box, sent.parameter_box)]
            at = translate_box(box, arrives.box, arrives.parameter_box)
            places.append(make(arrives.parameter, at))
            for copy in moves.rank_plan(sent.peer).copies:  # a member that needs the box twice
                if copy.from_target and copy.source == arrives.parameter and intersect(at, copy.source_box) == at:
                    places.append(make(copy.target, translate_box(at, copy.source_box, copy.target_box)))
    return result


def _report(path: Path) -> FolderReport:
    """Waits for the report of a rank; one that does not appear means that its weights are not known."""
    until = time.monotonic() + REPORT_SECONDS
    while not path.exists() and time.monotonic() < until:
        time.sleep(REPORT_POLL_SECONDS)
    return FolderReport(**json.loads(path.read_text())) if path.exists() else FolderReport()


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
