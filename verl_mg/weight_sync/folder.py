"""Weight sync to SGLang servers outside the job through a shared folder: whole directories, or changes where possible.

    FOLDER/weights-7                      all weights of version 7, as a Hugging Face directory
    FOLDER/changes-7/0.safetensors        what update 7 has changed, of the boxes that rank 0 sends
    FOLDER/changes-7/report-2-1.json      report of rank 1 of server 2

A folder of changes is written under a temporary name and renamed. What is of a version is removed when the next one is
complete: then every server has it, or needs all weights. FOLDER is only of this job.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from verl_mg.distributed.collectives import all_gather_json, sum_over_ranks
from verl_mg.engines.engine import EngineDiedError
from verl_mg.engines.sglang.folder_receiver import FolderReport, FolderRequest
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.reshard.delta import Place, member_name, write_changes
from verl_mg.reshard.delta_transfer import SentValues
from verl_mg.sharding.boxes import Box, Order, cut, intersect, slices, translate_box
from verl_mg.sharding.model_table import ModelTable
from verl_mg.training.runner import Runner
from verl_mg.weight_sync.servers import SENDER, Engines, Servers, ServerView, SyncResult, all_lost, wait_for_servers
from verl_mg.weight_sync.transfer_plan import Chunk, SourceWeights, TransferPlan, plan_to_engines

BOX_BYTES = 2**26
"""Bytes of a box that are compared at a time."""
# Longest wait for the report of a rank whose server has answered: a shared folder may show files late.
REPORT_SECONDS = 60.0
REPORT_POLL_SECONDS = 0.02

Places = Mapping[tuple[str, Box], Sequence[Place]]
"""Places in members of the boxes that this rank writes, by parameter of this rank and box in it."""

log = logging.getLogger(__name__)


@dataclass
class _Written:
    """State of this rank after it has written the weights of a version."""

    runner: Runner
    layouts: tuple[str, ...]
    plan: TransferPlan
    places: Sequence[Places]
    """Boxes of each chunk that this rank writes."""
    bytes_of: Mapping[str, int]
    """Bytes of all weights of a server, by its layout; replicas count on each rank."""
    sent: Sequence[SentValues]
    version: int = -1
    held: dict[tuple[int, str], int] = field(default_factory=dict)
    """Version of each server, by its number and start."""

    def holds(self, view: ServerView, *versions: int) -> bool:
        """Returns whether a server has one of these versions."""
        return self.held.get((view.number, view.start)) in versions


class FolderSync:
    """Transfer through files; with `table` servers that have the last version receive what has changed since.

    A Hugging Face directory has all weights; configuration and tokenizer are copied from `model_dir`.
    """

    # A file of changes has what each rank of a server needs, so servers need no tables.

    def __init__(self, folder: Path, model_dir: Path, table: ModelTable | None = None) -> None:
        self._folder, self._model_dir, self._table = folder.resolve(), model_dir, table
        self._saved = -1  # version of the directory
        self._written: _Written | None = None

    def transfer(self, weights: SourceWeights, engines: Engines, servers: Servers) -> SyncResult:
        """Implements `ServerTransport.transfer`; UserError if a server has not applied the changes."""
        started = time.perf_counter()
        send = self._send_changes if self._table else self._send_all
        result = send(weights, engines, servers)
        if dist.get_rank() == SENDER:  # after all have answered: no server still loads an older one
            kept = f"changes-{weights.version}", f"weights-{weights.version}"
            for old in [*self._folder.glob("changes-*"), *self._folder.glob("weights-*")]:
                if old.name not in kept:
                    shutil.rmtree(old)
        return SyncResult(result.metrics | {"time/weight_sync": time.perf_counter() - started}, result.lost)

    def _send_all(self, weights: SourceWeights, engines: Engines, servers: Servers) -> SyncResult:
        started, directory = time.perf_counter(), self._folder / f"weights-{weights.version}"
        if weights.version != self._saved:  # a server that joins later loads the directory that is there
            weights.save(directory, self._model_dir)
            self._saved = weights.version
        saved, lost = time.perf_counter(), []
        for view in servers:
            if view.number in engines:
                try:
                    engines[view.number].load_folder(directory, weights.version)
                except EngineDiedError:
                    lost.append(view.number)
        lost_by_all, loading = all_lost(lost), time.perf_counter() - saved
        seconds = {"time/weight_sync_writing": saved - started, "time/weight_sync_loading": loading}
        return SyncResult(seconds, lost_by_all)

    def _send_changes(self, weights: SourceWeights, engines: Engines, servers: Servers) -> SyncResult:
        version, written = weights.version, self._prepare(weights.runner, servers)
        lost, bytes_written, bytes_read = frozenset[int](), 0, 0
        waiting = [view for view in servers if written.version != version and written.holds(view, written.version)]
        if written.version != version:
            bytes_written = self._write(written, version, write=bool(waiting))
        if waiting:
            lost, bytes_read = self._apply(written, engines, waiting)
        # New servers, servers that have missed a version, and servers whose checksums differ.
        rest = [view for view in servers if view.number not in lost and not written.holds(view, version)]
        seconds: dict[str, float] = {}
        if rest:
            whole = self._send_all(weights, engines, rest)
            seconds, lost = whole.metrics, lost | whole.lost
            if dist.get_rank() == SENDER:
                bytes_written += _size(self._folder / f"weights-{version}")
            written.held |= {(view.number, view.start): version for view in rest if view.number not in lost}
        counted = {"weight_sync/bytes_written": bytes_written, "weight_sync/bytes_received": bytes_read}
        bound = {"weight_sync/bytes_lower_bound": sum(written.bytes_of[view.layout] for view in servers)}
        return SyncResult(sum_over_ranks([counted]) | bound | seconds, lost)

    def _prepare(self, runner: Runner, servers: Servers) -> _Written:
        """Returns the state of the last transfer; a new one for another runner or new layouts."""
        before = self._written
        layouts = tuple(sorted({view.layout for view in servers} | set(before.layouts if before else ())))
        if before is None or before.runner is not runner or before.layouts != layouts:
            self._written = before = self._plan(runner, layouts)
        return before

    def _write(self, written: _Written, version: int, write: bool) -> int:
        """Writes the changes since the last version, or only copies the values; returns the bytes of this rank."""
        folder, size = self._folder / f"changes-{version}", 0
        unfinished = folder.with_name(folder.name + ".partial")
        if write and dist.get_rank() == SENDER:
            for old in (folder, unfinished):
                shutil.rmtree(old, ignore_errors=True)
            unfinished.mkdir(parents=True)
        dist.barrier()  # the folder exists
        changes: list[tuple[Tensor, Sequence[Place]]] = []
        chunks = zip(written.plan.values(written.runner), written.places, written.sent, strict=True)
        for values, places, sent in chunks:
            for name in values.chunk.schedule.source_parameters:
                values.wait_for(name)
            for (parameter, box), of_box in places.items():
                held = values.tensors[parameter]
                assert isinstance(held, Tensor), "a folder has weights that are not quantized"
                if write:
                    changes.append((sent.encode(parameter, box, held.detach()[slices(box)]).cpu(), of_box))
                else:  # also without a reader: the next changes are relative to this version
                    sent.keep(parameter, box, held.detach()[slices(box)])
        if changes:
            size = write_changes(unfinished / f"{dist.get_rank()}.safetensors", changes)
        dist.barrier()  # all files are written
        if write and dist.get_rank() == SENDER:
            unfinished.rename(folder)
        dist.barrier()  # a leader may now name the folder to its servers
        written.version = version
        return size

    def _apply(self, written: _Written, engines: Engines, servers: Servers) -> tuple[frozenset[int], int]:
        """Has servers apply the changes; returns the lost ones, and the bytes that servers of this rank have read."""
        version = written.version
        requests: dict[ServerView, FolderRequest] = {}
        updates: dict[ServerView, Future[None]] = {}
        for view in servers:
            if view.number in engines:
                folder = str(self._folder / f"changes-{version}")
                requests[view] = FolderRequest(folder=folder, layout=view.layout, server=view.number)
                updates[view] = engines[view.number].update_shards(requests[view], version)
        done, problems, lost = wait_for_servers(updates)
        intact, received = list[int](), 0
        for view in done:
            reports = [_report(requests[view].report_path(rank)) for rank in range(view.ranks)]
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
        gone = frozenset(number for rank in outcome for number in rank["lost"])
        for view in servers:
            if view.number in confirmed:
                written.held[view.number, view.start] = version
                continue
            del written.held[view.number, view.start]
            if view.number not in gone and dist.get_rank() == SENDER:
                log.warning("rollout: the weights of %s differ from those that were sent; it loads all", view.url)
        return gone, received

    def _plan(self, runner: Runner, layouts: tuple[str, ...]) -> _Written:
        """Plans for one server of each layout; this covers servers that join later."""
        assert self._table
        # Servers follow the ranks of the job. A node has 1 rank, so every box is written by its source.
        first = dist.get_world_size()
        placements: list[EnginePlacement] = []
        members: dict[int, str] = {}
        for layout in layouts:
            parsed = EngineLayout.parse(layout)
            placements.append(EnginePlacement(parsed, tuple(range(first, first + parsed.ranks))))
            members |= {first + number: member_name(layout, number) for number in range(parsed.ranks)}
            first += parsed.ranks
        plan = plan_to_engines(runner, self._table, placements, receivers=list(members), ranks_per_node=1)
        bytes_of = {
            layout: sum(plan.lower_bounds[member] for member in placement.ranks)
            for layout, placement in zip(layouts, placements, strict=True)
        }
        orders = {name: {p: s.order for p, s in plan.target.shards(member).items()} for member, name in members.items()}
        places = [_places(chunk, members, orders) for chunk in plan.chunks]
        return _Written(runner, layouts, plan, places, bytes_of, [SentValues() for _ in plan.chunks])


def _places(chunk: Chunk, members: Mapping[int, str], orders: Mapping[str, Mapping[str, Order]]) -> Places:
    """Returns where the boxes that this rank sends are in the members, which are ranks of servers by layout."""
    rank = chunk.schedule.rank
    result: dict[tuple[str, Box], list[Place]] = defaultdict(list)
    for member, name in members.items():
        messages = chunk.received[member].segments(outgoing=False, peer=rank)
        arriving = {(segment.tensor, segment.box): segment for segment in messages}
        for sent in chunk.schedule.segments(outgoing=True, peer=member):
            arrives = arriving[sent.tensor, sent.box]
            for _, box in cut(sent.box, max(1, sent.nbytes // BOX_BYTES)):
                places = result[sent.parameter, translate_box(box, sent.box, sent.parameter_box)]
                at = translate_box(box, arrives.box, arrives.parameter_box)
                places.append(Place(name, arrives.parameter, at, sent.dtype, orders[name][arrives.parameter]))
                for copy in chunk.received[member].copies:  # a member that needs the box twice
                    if copy.from_target and copy.source == arrives.parameter and intersect(at, copy.source_box) == at:
                        there = translate_box(at, copy.source_box, copy.target_box)
                        places.append(Place(name, copy.target, there, sent.dtype, orders[name][copy.target]))
    return result


def _report(path: Path) -> FolderReport:
    """Waits for the report of a rank; one that does not appear means that its weights are not known."""
    until = time.monotonic() + REPORT_SECONDS
    while not path.exists() and time.monotonic() < until:
        time.sleep(REPORT_POLL_SECONDS)
    return FolderReport(**json.loads(path.read_text())) if path.exists() else FolderReport()


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
