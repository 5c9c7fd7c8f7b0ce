"""Weight sync into the engines of this job, whose processes copy what the ranks on their devices have received.

Two chunks are on their way at a time, one between ranks and one into the engine:

    ranks of the job                                      processes of the engine
    begin_load                                       ──▶ prepare their parameters, meanwhile
    receive chunk 0 in memory A
    handles of the memory ──▶ leader ──▶ load(chunk 0) ──▶ copy A into the parameters
    receive chunk 1 in memory B                             meanwhile
    finish waits                                      ◀── chunk 0 is copied; A is released, and allocated for chunk 2
    ...                                                   the last chunk carries the new version

With `rollout.delta` the memory has changes, which the processes apply. Checksums of the boxes decide whether an engine
then has the values of the senders: it may have missed a transfer, or its memory was overwritten.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import TypeVar

import torch.distributed as dist

from verl_mg import device
from verl_mg.distributed.collectives import all_gather_json, new_group
from verl_mg.engines.engine import EngineDiedError
from verl_mg.engines.payloads import PatchStaging, Staging
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.layout import EnginePlacement
from verl_mg.reshard import Traffic
from verl_mg.reshard.delta_transfer import SentValues
from verl_mg.reshard.encoding import Wire
from verl_mg.sharding.model_table import ModelTable
from verl_mg.training.runner import Runner
from verl_mg.weight_sync.kept_weights import KeptWeights, obstacle, take_back
from verl_mg.weight_sync.transfer_plan import (
    SourceWeights,
    TransferPlan,
    fitting_chunk_bytes,
    plan_to_engines,
    transfer_metrics,
)

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class ProcessEngineSync:
    """Transfer into engines: each rank assembles the shard of the engine's rank on its device and shares its memory.

    `engine` is on the first rank of each engine. `delta` sends only elements that have changed since the last transfer,
    and `merges=False` the weights under adapters.
    """

    def __init__(
        self,
        placement: EnginePlacement,
        groups: Mapping[int, dist.ProcessGroup],
        engine: ProcessEngine | None,
        table: ModelTable,
        wire: Wire = "cast",
        delta: bool = False,
        merges: bool = True,
    ) -> None:
        self._placement, self._engine, self._table, self._wire = placement, engine, table, wire
        self._delta, self._merges, self._device = delta, merges, device.current_device()
        self._sent: list[SentValues] = []  # copies of each chunk in host memory, to find changes
        self._all_have: tuple[Runner, int] | None = None  # whose weights of which version all engines have
        self._ranks_of = placement.members()
        self._groups = {rank: groups[number] for number, ranks in self._ranks_of.items() for rank in ranks}
        self._planned = cache(self._plan)

    @property
    def number(self) -> int:
        """Returns the number of this rank's engine."""
        return self._placement.coordinates(dist.get_rank()).engine

    def transfer(self, weights: SourceWeights) -> dict[str, float]:
        """Transfers weights to all engines; returns bytes and seconds as metrics."""
        return self._transfer(weights, self._placement)

    def transfer_to_engine(self, weights: SourceWeights, engine: int) -> None:
        """Transfers the weights to an engine that was restarted; the others continue to generate."""
        self._transfer(weights, EnginePlacement(self._placement.layout, self._ranks_of[engine]))

    def take_back(self, runner: Runner) -> KeptWeights | str:
        """Returns the weights of a runner that all engines have, or why they cannot be taken."""
        if problem := obstacle(runner, self._wire):
            return problem
        group, engines = self._groups.get(dist.get_rank()), self._table.shard_map_engine(self._placement)
        return take_back(runner, engines, group, self._engine, self._chunk_bytes())

    def barrier(self) -> None:
        """Waits for the other ranks of this rank's engine."""
        if dist.get_rank() in self._groups:
            dist.barrier(self._groups[dist.get_rank()])

    def _transfer(self, weights: SourceWeights, target: EnginePlacement) -> dict[str, float]:
        started, rank, version = time.perf_counter(), dist.get_rank(), (weights.runner, weights.version)
        plan = self._planned(weights.runner, target)
        group = self._groups[rank] if rank in target.ranks else None
        update = _EngineUpdate(self._engine if group else None, group, weights.version)
        traffic: list[Traffic] = []
        # Copies are of what all engines have: a transfer to one engine cannot use or replace them.
        keeps = self._delta and target == self._placement
        changes = keeps and self._all_have is not None and self._all_have[0] is weights.runner
        if changes and not self._send(weights, plan, update, traffic, keeps, changes):
            log.warning("rollout: the weights of an engine differ from those that were sent; all are sent again")
            changes = False
        if not changes:
            self._send(weights, plan, update, traffic, keeps, changes)
        if keeps:
            self._all_have = version
        elif self._all_have != version:
            self._all_have = None  # one engine is newer than the others
        # All ranks report here, so that none releases memory that an engine still reads.
        return transfer_metrics(traffic, plan.lower_bound, started)

    def _send(
        self,
        weights: SourceWeights,
        plan: TransferPlan,
        update: _EngineUpdate,
        traffic: list[Traffic],
        keeps: bool,
        changes: bool,
    ) -> bool:
        """Sends all values or `changes`; returns whether all engines have the values of the senders then."""
        patched: list[PatchStaging] = []
        if keeps and not changes:
            self._sent = [SentValues() for _ in plan.chunks]
        for number, values in enumerate(plan.values(weights.runner, self._merges)):
            # One buffer for a chunk, so that an engine opens one handle; of one size for all chunks, so that torch's
            # allocator gives back the memory that the engine has closed.
            staging: Staging | PatchStaging
            if changes:
                patches, counted = values.send_changes(self._sent[number])
                staging = PatchStaging(patches, values.chunk.shards, self._device)
                patched.append(staging)
            else:
                staging = Staging(values.chunk.shards, values.chunk.dtypes, self._device, plan.staging_bytes)
                counted = values.send(staging.tensors)
                if keeps:
                    values.keep(self._sent[number])
            traffic.append(counted)
            update.load(staging, is_last=number == len(plan.chunks) - 1)
        update.finish()
        # An engine that died is restarted, and then receives all values.
        return not changes or all(all_gather_json(not update.is_loaded() or all(part.intact() for part in patched)))

    def _plan(self, runner: Runner, placement: EnginePlacement) -> TransferPlan:
        return plan_to_engines(runner, self._table, [placement], self._wire, max_bytes=self._chunk_bytes())

    def _chunk_bytes(self) -> int:
        # Memory is measured as it is during transfers: with the weights on the device, and torch's cache empty.
        device.release_unused_memory()
        return fitting_chunk_bytes(all_gather_json(device.free_memory()))


class _EngineUpdate:
    """Update of the engine to which this rank belongs, by its leader; `group` has its ranks, None outside of it."""

    # The engine's process may end at any time. Its ranks still take part in the transfer, because other ranks wait for
    # their messages; the engine is restarted before it generates samples.

    def __init__(self, engine: ProcessEngine | None, group: dist.ProcessGroup | None, version: int) -> None:
        self._engine, self._group, self._version = engine, group, version
        self._loading: int | None = None
        self._staging: Staging | PatchStaging | None = None
        self._died = False
        self._call(lambda engine: engine.begin_load())

    def load(self, staging: Staging | PatchStaging, is_last: bool) -> None:
        """Starts copying a chunk into the parameters, from the memory of all ranks of the engine."""
        self.finish()  # the chunk before: its memory is released when this one replaces it
        if self._group is None:
            return
        payloads = all_gather_json(None if self._died else staging.payload(), self._group)
        if None in payloads:
            self._group = None
            return
        self._staging = staging
        self._loading = self._call(lambda engine: engine.load(payloads, self._version if is_last else None))

    def finish(self) -> None:
        """Waits until the engine has copied the chunk of the last `load`; it has the new version after the last one."""
        loading, self._loading = self._loading, None
        if loading is not None:
            self._call(lambda engine: engine.loaded(loading))

    def is_loaded(self) -> bool:
        """Returns whether this rank's engine has all chunks of `load`; the ranks of an engine call it together."""
        # Only the leader knows of a death, and the others would wait for the engine's reports.
        return self._group is not None and not any(all_gather_json(self._died, self._group))

    def _call(self, function: Callable[[ProcessEngine], Result]) -> Result | None:
        if self._engine is not None:
            try:
                return function(self._engine)
            except EngineDiedError as error:
                log.warning("rollout: an engine ended before it had the new weights; it will be restarted: %s", error)
                self._engine, self._died = None, True
        return None


def engine_groups(placement: EnginePlacement) -> dict[int, dist.ProcessGroup]:
    """Creates a group of the ranks of each engine, by its number; all ranks call it together."""
    # torch requires every rank to take part in the creation of every group. gloo, for JSON and barriers of the host.
    return {number: new_group(ranks, "gloo") for number, ranks in placement.members().items()}
