"""Weight sync that sends only adapters, whole, to the ranks that lead engines; these receive other weights once."""

# Adapters are small, and both engines cut them when they load them.

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import cache

import torch
import torch.distributed as dist

from verl_mg.checkpoint.peft import adapted_tensors, adapter_fields, adapter_shapes
from verl_mg.engines.engine import EngineDiedError
from verl_mg.engines.engine_options import AdapterSettings
from verl_mg.engines.payloads import Staging
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.layout import EnginePlacement
from verl_mg.sharding.boxes import Piece, Shard, full_box
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.shard_map import ExplicitShardMap
from verl_mg.training.runner import Runner
from verl_mg.weight_sync.ipc import ProcessEngineSync
from verl_mg.weight_sync.transfer_plan import ChunkValues, SourceWeights, TransferPlan, plan_transfer, transfer_metrics

log = logging.getLogger(__name__)


class AdapterSync(ProcessEngineSync):
    """Transfer of the weights to each engine once and after a restart, and of A and B to its leader at each update."""

    def __init__(
        self,
        placement: EnginePlacement,
        groups: Mapping[int, dist.ProcessGroup],
        engine: ProcessEngine | None,
        table: ModelTable,
        adapters: AdapterSettings,
    ) -> None:
        super().__init__(placement, groups, engine, table, merges=False)
        self._adapters = adapters
        self._have_weights: Runner | None = None  # whose weights all engines have
        self._planned_adapters = cache(self._plan_adapters)

    def transfer(self, weights: SourceWeights) -> dict[str, float]:
        """Transfers the adapters to all engines, and before the first time the weights."""
        sent: dict[str, float] = {}
        if self._have_weights is not weights.runner:
            sent = super().transfer(weights)
            self._have_weights = weights.runner
        adapters = self._transfer_adapters(weights, tuple(sorted(self._ranks_of)))
        return {name: value + sent.get(name, 0.0) for name, value in adapters.items()}

    def transfer_to_engine(self, weights: SourceWeights, engine: int) -> None:
        """Transfers weights and adapters to an engine that was restarted; the others continue to generate."""
        super().transfer_to_engine(weights, engine)
        self._transfer_adapters(weights, (engine,))

    def _transfer_adapters(self, weights: SourceWeights, engines: tuple[int, ...]) -> dict[str, float]:
        started, runner = time.perf_counter(), weights.runner
        plan = self._planned_adapters(runner, engines)
        shapes = {name: shard.shape for name, shard in plan.target.shards(dist.get_rank()).items()}
        received = {name: torch.empty(shape, dtype=runner.dtype, device=self._device) for name, shape in shapes.items()}
        traffic = [ChunkValues(chunk, runner.adapters()).send(received) for chunk in plan.chunks]
        if received and self._engine:
            self._load(self._engine, weights, received)
        self.barrier()
        return transfer_metrics(traffic, plan.lower_bound, started)

    def _load(self, engine: ProcessEngine, weights: SourceWeights, received: Mapping[str, torch.Tensor]) -> None:
        """Loads adapters into the engine that this rank leads, from host memory, as engines take them."""
        lora, table, dtype = weights.runner.lora, weights.runner.table, weights.runner.dtype
        assert lora
        # Engines fuse projections and read adapters of all of a fused one; untrained ones are 0.
        complete = adapter_shapes(table, adapted_tensors(table, self._adapters.targets), lora.config.rank)
        shards = {name: _whole(name, shape) for name, shape in complete.items()}
        staging = Staging(shards, dict.fromkeys(shards, dtype), torch.device("cpu"))
        for name, tensor in staging.tensors.items():
            tensor.copy_(received[name]) if name in received else tensor.zero_()
        fields = adapter_fields(lora.config, lora.adapted) | {"target_modules": list(self._adapters.targets)}
        # One for each process of the engine that reads them.
        payloads = [staging.payload() for _ in range(engine.num_adapter_readers)]
        try:
            engine.load_adapters(payloads, weights.version, fields)
        except EngineDiedError as error:
            log.warning("rollout: an engine ended before it had its adapters; it will be restarted: %s", error)

    def _plan_adapters(self, runner: Runner, engines: tuple[int, ...]) -> TransferPlan:
        lora = runner.lora
        assert lora
        source = lora.shard_map(runner.shard_map())
        whole = {name: _whole(name, shape) for name, shape in lora.shapes.items()}
        leaders = [self._ranks_of[engine][0] for engine in engines]
        return plan_transfer(source, ExplicitShardMap(dict.fromkeys(leaders, whole), source.tensors), runner.dtype)


def _whole(name: str, shape: tuple[int, ...]) -> Shard:
    return Shard(shape, (Piece(name, full_box(shape), full_box(shape)),))
