"""Weight sync that sends only adapters, whole, to the ranks that lead engines; these receive other weights once."""

# Adapters are small, and both engines cut them when they load them.

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

from verl_mg import device
from verl_mg.checkpoint.peft import adapted_tensors, adapter_fields, adapter_shapes
from verl_mg.engines.engine import EngineDiedError
from verl_mg.engines.engine_options import AdapterSettings
from verl_mg.engines.ipc_payload import Staging
from verl_mg.reshard import Schedule, execute, plan, schedule
from verl_mg.sharding.boxes import Piece, Shard, full_box
from verl_mg.sharding.shard_map import ExplicitShardMap
from verl_mg.weight_sync.engines import ProcessEngineSync, transfer_metrics
from verl_mg.weight_sync.policy import Policy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Transfer:
    """A transfer of adapters to the leaders of some engines, as this rank takes part in it."""

    messages: Schedule
    received: dict[str, Shard]
    """Whole tensors that arrive on this rank, by PEFT's names; {} on a rank that leads no engine."""
    shards: dict[str, Shard]
    """All tensors that its engine reads; those that do not arrive are 0."""
    lower_bound: int
    """The fewest bytes that this rank can receive."""


class AdapterSync:
    """Transfer of the weights to each engine once and after a restart, and of A and B to its leader at each update."""

    def __init__(self, weights: ProcessEngineSync, adapters: AdapterSettings) -> None:
        self._weights, self._adapters = weights, adapters
        self._have_weights: Policy | None = None  # whose weights all engines have
        self._planned = cache(self._plan)

    @property
    def number(self) -> int:
        """Returns the number of this rank's engine."""
        return self._weights.number

    def barrier(self) -> None:
        """Waits for the other ranks of this rank's engine."""
        self._weights.barrier()

    def transfer(self, actor: Policy) -> dict[str, float]:
        """Transfers the adapters to all engines, and before the first time the weights."""
        sent: dict[str, float] = {}
        if self._have_weights is not actor:
            sent = self._weights.transfer(actor)
            self._have_weights = actor
        placement = self._weights.placement
        engines = sorted({placement.coordinates(rank).engine for rank in placement.ranks})
        adapters = self._transfer_adapters(actor, tuple(engines))
        return {name: value + sent.get(name, 0.0) for name, value in adapters.items()}

    def transfer_to_engine(self, actor: Policy, engine: int) -> None:
        """Transfers weights and adapters to an engine that was restarted; the others continue to generate."""
        self._weights.transfer_to_engine(actor, engine)
        self._transfer_adapters(actor, (engine,))

    def _transfer_adapters(self, actor: Policy, engines: Sequence[int]) -> dict[str, float]:
        started = time.perf_counter()
        planned, lora = self._planned(actor, tuple(engines)), actor.runner.lora
        assert lora
        dtype, here = actor.runner.dtype, device.current_device()
        received = {name: torch.empty(of.shape, dtype=dtype, device=here) for name, of in planned.received.items()}
        traffic = execute(planned.messages, actor.runner.adapters(), received)
        if planned.shards and (engine := self._weights.engine):
            # In host memory, from which engines take adapters.
            staging = Staging(planned.shards, dict.fromkeys(planned.shards, dtype), torch.device("cpu"))
            # Engines fuse projections and read adapters of all of a fused one; untrained ones are 0.
            for name, tensor in staging.tensors.items():
                tensor.copy_(received[name]) if name in received else tensor.zero_()
            fields = adapter_fields(lora.config, lora.adapted) | {"target_modules": list(self._adapters.targets)}
            # One for each process of the engine that reads them.
            payloads = [staging.payload() for _ in range(engine.num_adapter_readers)]
            try:
                engine.load_adapters(payloads, actor.num_updates, fields)
            except EngineDiedError as error:
                log.warning("rollout: an engine ended before it had its adapters; it will be restarted: %s", error)
        self.barrier()
        return transfer_metrics([traffic], planned.lower_bound, started)

    def _plan(self, actor: Policy, engines: tuple[int, ...]) -> _Transfer:
        """Returns the transfer, once: layouts do not change between iterations."""
        rank, runner, lora = dist.get_rank(), actor.runner, actor.runner.lora
        assert lora
        targets = self._adapters.targets
        complete = adapter_shapes(runner.table, adapted_tensors(runner.table, targets), lora.config.rank)
        whole = {name: _whole(name, shape) for name, shape in lora.shapes.items()}
        source = lora.shard_map(runner.shard_map())
        leaders = [self._weights.ranks_of(engine)[0] for engine in engines]
        target = ExplicitShardMap(dict.fromkeys(leaders, whole), source.tensors)
        moves = plan(source, target, device.ranks_of_a_node(dist.get_world_size()))
        return _Transfer(
            schedule(moves, rank, runner.dtype),
            whole if rank in leaders else {},
            {name: _whole(name, shape) for name, shape in complete.items()} if rank in leaders else {},
            moves.lower_bound(rank, runner.dtype.itemsize),
        )


def _whole(name: str, shape: tuple[int, ...]) -> Shard:
    return Shard(shape, (Piece(name, full_box(shape), full_box(shape)),))
