"""Counts what a job of DeepSeek-V3 needs around its computation, for 64 to 4,096 ranks, without starting a process.

    python -m tools.bench.simulate_control [--ranks 64,256,1024,4096] [--layout tp8-pp16-ep8-etp1]
        [--engines tp32-ep32-adp32]

The job is PPO with actor, critic and reference under one layout, replay of the engines' routing, and engines on the
same ranks; few ranks have fewer pipeline stages. Every figure comes from the functions that a job itself uses:
`group_ranks`, `plan`, `ReaderShardMap`, `columns_needed`, `plan_deliveries`, and the intervals of heartbeats and polls.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch

from verl_mg.batch import ColumnKind
from verl_mg.checkpoint.hf_safetensors import split_by_size
from verl_mg.checkpoint.reader_assignment import ReaderShardMap
from verl_mg.distributed.watchdog import REQUESTS_PER_HEARTBEAT, heartbeat_seconds
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.layout.layout import group_ranks
from verl_mg.layout.packing import plan_evenly
from verl_mg.models.hf_config import read_config
from verl_mg.reshard import plan
from verl_mg.reshard.schedule import BUCKET_BYTES
from verl_mg.roles.role import FORWARD_COLUMNS, columns_needed
from verl_mg.rollout.engine_worker import REQUESTS_PER_POLL, poll_seconds
from verl_mg.rows.plan import ColumnPart, ColumnSchema, RowIndex, plan_deliveries, row_bytes, whole_columns
from verl_mg.sharding.weight_table import WeightTable, weight_table

CONFIG = Path(__file__).parents[1] / "model_configs" / "deepseek_v3.json"
NODE, ITEMSIZE = 8, 2
TRAINED, FROZEN = 2, 1
"""Actor and critic; reference."""
HF_FILES = 163
"""Files of the published checkpoint."""
PROMPTS, GROUP_SIZE, MINIBATCHES, TOKENS_PER_MICRO_BATCH = 128, 16, 4, 18432
MEAN_LENGTH = 9216
"""Half of the prompt and response that the configuration allows, in tokens."""
FORWARD_PASSES, UPDATES = 3, 2
"""Log-probabilities of actor and reference, values; updates of critic and actor."""
LAYERS, TOP_K = 61, 8
"""Layers, and experts of a token."""
LOSS_COLUMNS = ("logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns")
SCHEMA = {
    name: ColumnSchema(ColumnKind.TOKEN, dtype, shape)
    for name, dtype, shape in (
        ("tokens", torch.int64, ()),
        ("loss_mask", torch.bool, ()),
        ("routed_experts", torch.int16, (LAYERS, TOP_K)),
        ("policy_versions", torch.int64, ()),
        *((name, torch.float32, ()) for name in LOSS_COLUMNS),
    )
}
"""Columns of the batch in an update."""
FORWARD_SCHEMA = {name: SCHEMA[name] for name in FORWARD_COLUMNS if name in SCHEMA}
"""Columns of the batch in a forward pass."""
OPENS_OF_RANK, OPENS_OF_RANK_0 = 3, 9
"""A rank writes its file of a checkpoint, reads it for its sum, and for its values; rank 0 has a few files more."""


def _figure(text: str) -> int:
    """Returns a field of `Figures` with its description."""
    value: int = field(metadata={"text": text})
    return value


@dataclass(frozen=True)
class Figures:
    """Figures of a job; one of a single rank is that of the rank with the most."""

    groups: int = _figure("process groups that a rank joins")
    new_groups: int = _figure("process groups made in the job")
    gloo_connections: int = _figure("TCP connections of a rank over gloo")
    sync_peers: int = _figure("ranks that a rank exchanges messages with in a weight sync")
    sync_messages: int = _figure("messages of a rank in a weight sync")
    store_requests: int = _figure("requests to the store in a second")
    files_at_start: int = _figure("files opened to load three models")
    files_of_checkpoint: int = _figure("files opened to write a checkpoint and read it")
    files_of_resume: int = _figure("files opened to load what checkpoints do not contain")
    row_mb_computed: int = _figure("MB of rows that a rank computes on in an iteration, mean")
    row_mb_received: int = _figure("MB of rows that a rank receives in an iteration")
    row_mb_sent: int = _figure("MB of rows that a rank sends in an iteration")
    row_peers: int = _figure("ranks that a rank exchanges rows with")


class SimulatedJob:
    """The job on a number of ranks.

    Attributes:
        table: weights of the model.
        ranks: number of ranks.
        placement: ranks and layout of the models.
        engines: ranks and layout of the engines.
        source: shards of a model.
    """

    def __init__(self, table: WeightTable, ranks: int, layout: Layout, engines: EngineLayout) -> None:
        """Places models and engines on all ranks."""
        self.table, self.ranks = table, ranks
        pp = min(layout.pp, ranks // (2 * NODE))
        fitting = replace(layout, pp=pp, dp=ranks // (layout.tp * layout.cp * pp))
        self.placement = Placement(fitting, tuple(range(ranks)))
        self.engines = EnginePlacement(engines, tuple(range(ranks)))
        self.source = table.shard_map_megatron(self.placement)

    def figures(self) -> Figures:
        """Returns what the job needs."""
        # The three models share a placement and its groups. An engine has a gloo group for handles and barriers. Gloo
        # connects all ranks in the default group and in that of the checkpointer.
        models = [group for group in group_ranks(self.placement) if len(group) < self.ranks]
        engines = list(self.engines.members().values())
        checkpointer = tuple(range(self.ranks))
        groups = [*models, *engines, checkpointer]
        joined = Counter(rank for group in groups for rank in group)
        sync = plan(self.source, self.table.shard_map_engine(self.engines), NODE)
        rows = _RowTraffic(self)
        return Figures(
            groups=max(joined.values()),
            new_groups=len(groups),
            gloo_connections=2 * (self.ranks - 1) + self.engines.layout.ranks - 1,
            sync_peers=max(map(len, sync.peers().values())),
            sync_messages=max(sync.epochs(ITEMSIZE, BUCKET_BYTES).messages().values()),
            store_requests=self._store_requests(),
            files_at_start=self._files_of_models(self.table.tensor_index.tensors.keys()),
            files_of_checkpoint=OPENS_OF_RANK * self.ranks + OPENS_OF_RANK_0,
            files_of_resume=self._files_of_models(self.table.router_biases),
            row_mb_computed=round(statistics.mean(rows.computed.values()) / 1e6),
            row_mb_received=round(max(rows.received.values()) / 1e6),
            row_mb_sent=round(max(rows.sent.values()) / 1e6),
            row_peers=max(map(len, rows.peers.values())),
        )

    def _store_requests(self) -> int:
        """Returns requests a second while engines generate: heartbeats, and polls of the work queue."""
        engines = self.ranks // self.engines.layout.ranks
        heartbeats = self.ranks * REQUESTS_PER_HEARTBEAT / heartbeat_seconds(self.ranks)
        return round(heartbeats + engines * REQUESTS_PER_POLL / poll_seconds(engines))

    def _files_of_models(self, read_by_trained: Collection[str]) -> int:
        """Returns the files that all ranks open in order to load the models.

        Rank 0 opens the index, and each file for its header and for the fingerprint of the model in the sample files.
        """
        shapes = {name: info.shape for name, info in self.source.tensors.items()}
        size = sum(math.prod(shape) for shape in shapes.values()) * ITEMSIZE
        files = split_by_size(shapes, ITEMSIZE, size // HF_FILES)
        file_of = {name: str(number) for number, names in enumerate(files) for name in names}
        trained = {name: file for name, file in file_of.items() if name in read_by_trained}
        frozen_opens, trained_opens = (
            sum(map(len, ReaderShardMap(self.source, chosen).elements.values())) for chosen in (file_of, trained)
        )
        return 1 + 2 * len(files) + FROZEN * frozen_opens + TRAINED * trained_opens


class _RowTraffic:
    """Bytes of rows and ranks that exchange them, by rank, over one iteration.

    Engine leaders generate the rows, which are then distributed over all ranks. Each forward pass and each mini-batch
    of an update transfers them to the ranks that compute.
    """

    def __init__(self, job: SimulatedJob) -> None:
        self.computed, self.received, self.sent = Counter[int](), Counter[int](), Counter[int]()
        self.peers: dict[int, set[int]] = defaultdict(set)
        self._model, self._placement = job.table.config, job.placement
        ranks, engine = job.ranks, job.engines.layout.ranks
        count = PROMPTS * GROUP_SIZE
        self._lengths = tuple(MEAN_LENGTH // 2 + 37 * row * row % MEAN_LENGTH for row in range(count))
        # Each rank scores and keeps the samples of whole prompts.
        owners = [-(-(row // GROUP_SIZE + 1) * ranks // PROMPTS) - 1 for row in range(count)]
        leaders = [row % (ranks // engine) * engine for row in range(count)]
        rows_of = [[row for row in range(count) if owners[row] == rank] for rank in range(ranks)]
        self._transfer(self._index(leaders, 0, count), rows_of, [whole_columns(SCHEMA)] * ranks, 1)
        self._transfer(*self._to_models(self._index(owners, 0, count), FORWARD_SCHEMA), FORWARD_PASSES)
        for step in range(MINIBATCHES):
            index = self._index(owners, step * count // MINIBATCHES, (step + 1) * count // MINIBATCHES)
            self._transfer(*self._to_models(index, SCHEMA), UPDATES)

    def _index(self, owners: Sequence[int], first: int, end: int) -> RowIndex:
        numbers = tuple(range(end - first))
        return RowIndex(numbers, tuple(owners[first:end]), numbers, self._lengths[first:end], (), (), SCHEMA)

    def _to_models(
        self, index: RowIndex, schema: Mapping[str, ColumnSchema]
    ) -> tuple[RowIndex, list[list[int]], list[list[ColumnPart]]]:
        """Returns the rows and the columns that each rank of the models receives."""
        layout = self._placement.layout
        costs = list(map(float, index.lengths))
        packed = plan_evenly(index.lengths, costs, layout.dp, layout.cp, TOKENS_PER_MICRO_BATCH)
        rows = [[row for micro in steps for row in micro] for steps in packed.rows]
        by_stage = [columns_needed(schema, layout.stage(LAYERS, stage), self._model) for stage in range(layout.pp)]
        places = [self._placement.coordinates(rank) for rank in self._placement.ranks]
        return index, [rows[at.dp] for at in places if at], [by_stage[at.pp] for at in places if at]

    def _transfer(
        self, index: RowIndex, wanted: Sequence[Sequence[int]], parts: Sequence[Sequence[ColumnPart]], times: int
    ) -> None:
        for delivery in plan_deliveries(index, wanted, parts, NODE):
            for sender, receiver in delivery.hops:
                self.sent[sender] += times * delivery.num_bytes
                self.received[receiver] += times * delivery.num_bytes
                self.peers[sender].add(receiver)
                self.peers[receiver].add(sender)
        if parts[0] == whole_columns(SCHEMA):
            return  # rows change their owner, and nothing is computed
        sizes: dict[tuple[ColumnPart, ...], list[int]] = {}
        for rank, rows in enumerate(wanted):
            columns = tuple(parts[rank])
            if columns not in sizes:
                sizes[columns] = row_bytes(index, range(len(index)), columns)
            self.computed[rank] += times * sum(sizes[columns][row] for row in rows)


def main() -> None:
    """Prints a table with a column for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,256,1024,4096", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--layout", default="tp8-pp16-ep8-etp1", help="of the models (default: %(default)s)")
    parser.add_argument("--engines", default="tp32-ep32-adp32", help="layout of an engine (default: %(default)s)")
    options = parser.parse_args()
    numbers = [int(text) for text in options.ranks.split(",")]
    table, layout, engines = (
        weight_table(read_config(CONFIG)),
        Layout.parse(options.layout),
        EngineLayout.parse(options.engines),
    )
    columns = [SimulatedJob(table, ranks, layout, engines).figures() for ranks in numbers]
    print("| | " + " | ".join(f"{ranks:,} ranks" for ranks in numbers) + " |")
    print("|---" + "|---:" * len(numbers) + "|")
    for item in fields(Figures):
        values = [f"{getattr(figures, item.name):,}" for figures in columns]
        print(f"| {item.metadata['text']} | " + " | ".join(values) + " |")


if __name__ == "__main__":
    main()
