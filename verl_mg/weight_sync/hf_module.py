"""Weight sync into a module of `transformers` on every rank; parameters that a rank has are shared with it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from verl_mg.engines.hf.engine import HFEngine
from verl_mg.reshard import Schedule
from verl_mg.reshard.plan import Copy
from verl_mg.sharding.boxes import full_box
from verl_mg.training.runner import Runner
from verl_mg.weight_sync.transfer_plan import SourceWeights, TransferPlan, plan_transfer, transfer_metrics


class HFEngineSync:
    """Transfer into the module of each rank, in place."""

    def __init__(self, engine: HFEngine) -> None:
        self._engine = engine
        self._plan: TransferPlan | None = None

    def transfer(self, weights: SourceWeights) -> dict[str, float]:
        """Transfers weights into the modules; returns bytes and seconds as metrics."""
        started, runner = time.perf_counter(), weights.runner
        self._engine.begin_update()
        self._plan = self._plan or self._plan_and_share(runner)
        tensors, shards = self._engine.parameters(), self._plan.target.shards(dist.get_rank())
        target = {name: shard.described(tensors[name]) for name, shard in shards.items()}
        traffic = [values.send(target) for values in self._plan.values(runner)]
        runner.wait_for()  # the module shares memory with parameters that are not transferred
        self._engine.end_update(weights.version)
        return transfer_metrics(traffic, self._plan.lower_bound, started)

    def _plan_and_share(self, runner: Runner) -> TransferPlan:
        """Plans the transfer, and gives the module the parameters that this rank has whole and unchanged."""
        ranks, parameters = range(dist.get_world_size()), runner.parameters()
        whole = runner.table.shard_map_replicated(ranks)
        plan = plan_transfer(runner.shard_map(), whole, runner.dtype, sized_by=ranks[:1])
        shards = whole.shards(dist.get_rank())
        shared = {
            name: shards[name].as_parameter(_rows(parameters[alias.source].detach(), alias))
            for chunk in plan.chunks
            for name, alias in aliases(chunk.schedule).items()
            if alias.source not in runner.computed_parameters  # these are new tensors in each sync
        }
        self._engine.share(shared)
        return plan


@dataclass(frozen=True)
class Alias:
    """A target parameter that consists of consecutive rows of a source parameter."""

    source: str  # the source parameter
    rows: tuple[int, int]  # its first row, and the row after the last one; of a scalar (0, 1)


def aliases(schedule: Schedule) -> dict[str, Alias]:
    """Finds the target parameters of a rank that are rows of a source parameter: same elements, same order."""
    # Such targets need no memory, and `execute` copies nothing into them.
    received = {segment.parameter for segment in schedule.segments(outgoing=False)}
    copied: dict[str, list[Copy]] = defaultdict(list)
    for copy in schedule.copies:
        copied[copy.target].append(copy)
    candidates = {name: _alias(schedule, copies) for name, copies in copied.items() if name not in received}
    return {name: alias for name, alias in candidates.items() if alias}


def _alias(schedule: Schedule, copies: Sequence[Copy]) -> Alias | None:
    first = copies[0]
    source, target = schedule.source_shapes.get(first.source), schedule.target_shapes[first.target]
    if source is None or len(source) != len(target) or source[1:] != target[1:]:
        return None
    if not target:  # a scalar, which one copy fills
        return None if first.from_target else Alias(first.source, (0, 1))
    # All copies must shift rows by the same distance: then they are one run, in the order of the source.
    offset = first.source_box[0][0] - first.target_box[0][0]
    for copy in copies:
        rows = tuple(edge + offset for edge in copy.target_box[0])
        whole_rows = copy.target_box[1:] == copy.source_box[1:] == full_box(target[1:])
        if copy.from_target or copy.source != first.source or copy.source_box[0] != rows or not whole_rows:
            return None
    if offset < 0 or offset + target[0] > source[0]:
        return None
    return Alias(first.source, (offset, offset + target[0]))


def _rows(source: Tensor, alias: Alias) -> Tensor:
    return source[slice(*alias.rows)] if source.dim() else source
