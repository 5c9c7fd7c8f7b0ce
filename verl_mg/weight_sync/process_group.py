"""Weight sync to SGLang servers over process groups: shards to the servers that can receive them, else broadcasts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from verl_mg.engines.sglang.arguments import check_on_cpu
from verl_mg.engines.sglang.shard_receiver import RECEIVER
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.reshard.encode import check_engine_blocks
from verl_mg.reshard.encoding import Wire, encoding_of
from verl_mg.servers.remote_engine import RemoteEngine
from verl_mg.sharding.model_table import ModelTable
from verl_mg.weight_sync.broadcast import BroadcastSync
from verl_mg.weight_sync.servers import SENDER, ServerView, SyncResult
from verl_mg.weight_sync.shards import ShardSync
from verl_mg.weight_sync.transfer_plan import SourceWeights

log = logging.getLogger(__name__)


class ProcessGroupSync:
    """Transfer over process groups, by the way that each server supports.

    `broadcast_to_all` broadcasts also to servers that could receive shards. Quantized weights (`wire`) and changes
    (`delta`) are sent only as shards.
    """

    def __init__(
        self, table: ModelTable, broadcast_to_all: bool = False, wire: Wire = "cast", delta: bool = False
    ) -> None:
        self._table, self._broadcast_to_all, self._wire = table, broadcast_to_all, wire
        self._shards_only = delta or wire != "cast"
        self._shards, self._broadcast = ShardSync(table, wire, delta), BroadcastSync()
        self._warned: set[str] = set()

    def transfer(
        self, weights: SourceWeights, engines: Mapping[int, RemoteEngine], servers: Sequence[ServerView]
    ) -> SyncResult:
        """Implements `ServerTransport.transfer`; UserError if a server needs shards and cannot receive them."""
        obstacles = {view.number: self._obstacle(view) for view in servers}
        receiving = [view for view in servers if not obstacles[view.number]]
        others = [view for view in servers if obstacles[view.number]]
        if others and self._shards_only:
            raise UserError(
                f"{others[0].url}: {obstacles[others[0].number]}; with rollout.wire and rollout.delta servers receive "
                "only shards. Start it otherwise, or leave both out."
            )
        metrics: Counter[str] = Counter()
        if receiving:
            result = self._shards.transfer(weights, engines, receiving)
            if result.lost:  # the caller repeats the transfer without them
                return result
            metrics.update(result.metrics)
        if others:
            result = self._broadcast.transfer(weights, engines, others)
            metrics.update(result.metrics)
            # Shards were configured, and a broadcast costs many times the bytes.
            if not self._broadcast_to_all and dist.get_rank() == SENDER:
                self._warn(others, obstacles, result.metrics)
        return SyncResult(dict(metrics))

    def _obstacle(self, view: ServerView) -> str:
        """Returns why a server receives the whole model; empty where its ranks receive their shards."""
        if self._broadcast_to_all:
            return "rollout.weight_transfer=broadcast"
        return view.shard_obstacle or table_obstacle(self._table, EngineLayout.parse(view.layout), self._wire)

    def _warn(self, views: Sequence[ServerView], obstacles: Mapping[int, str], metrics: Mapping[str, float]) -> None:
        new = [view for view in views if view.url not in self._warned]
        self._warned |= {view.url for view in new}
        if new:
            received, needed = metrics["weight_sync/bytes_received"], metrics["weight_sync/bytes_lower_bound"]
            log.warning(
                "%s: %s. Each rank of %d servers receives the whole model through one rank: %.3g GB per update instead "
                "of about %.3g GB. Start servers with --custom-weight-loader %s where verl_mg can be imported.",
                new[0].url, obstacles[new[0].number], len(views), received / 1e9, needed / 1e9, RECEIVER,
            )  # fmt: skip


def table_obstacle(table: ModelTable, layout: EngineLayout, wire: Wire = "cast") -> str:
    """Returns why the shards of a server of some layout are not known; empty where they are."""
    try:
        table.check_engine_layout(layout)
        if encoding := encoding_of(wire):
            shards = table.shard_map_engine(EnginePlacement(layout, tuple(range(layout.ranks))))
            check_engine_blocks(table, shards, encoding, shards.ranks)
        check_on_cpu(table.config, table.model_dims, layout)
    except UserError as error:
        return str(error).rstrip(".")
    return ""
