"""Measures the transfer of a batch's rows to the ranks of a role, on 8 gloo ranks.

    python -m tools.bench.bench_rows [--layout tp2-pp4] [--rows 64] [--tokens 4096] [--rounds 5]

The rows travel in turn by the plan of `rows.plan` and as whole rows from their owners to every rank of a
data-parallel index in one all-to-all. `simulate_control.py` counts the bytes of large jobs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from tools.bench.harness import medians, on_ranks, options_of, seconds_in_turn
from tools.bench.simulate_control import CONFIG, FORWARD_SCHEMA, LAYERS, TOKENS_PER_MICRO_BATCH, TOP_K
from verl_mg.batch import Batch
from verl_mg.distributed.collectives import all_to_all_bytes
from verl_mg.layout import Layout, Placement
from verl_mg.layout.packing import plan_evenly
from verl_mg.models.hf_config import read_config
from verl_mg.roles.role import columns_needed
from verl_mg.rows.dispatch import gather_rows
from verl_mg.rows.plan import ColumnPart, RowIndex, RowIndexer, plan_deliveries, row_bytes, whole_columns

RANKS = 8
Wanted = tuple[list[list[int]], list[list[ColumnPart]]]
"""Rows and parts of the columns that each rank receives."""


def main() -> None:
    """Prints the medians of both transfers."""
    parser = options_of(__doc__, rows=64, tokens=4096, rounds=5)
    parser.add_argument("--layout", default="tp2-pp4")
    options = parser.parse_args()
    on_ranks(RANKS, _rank, options)


def _wanted(index: RowIndex, placement: Placement) -> Wanted:
    layout = placement.layout
    plan = plan_evenly(index.lengths, list(map(float, index.lengths)), layout.dp, layout.cp, TOKENS_PER_MICRO_BATCH)
    by_slot = [[row for micro in steps for row in micro] for steps in plan.rows]
    stages, model = range(layout.pp), read_config(CONFIG)
    by_stage = [columns_needed(FORWARD_SCHEMA, layout.stage(LAYERS, stage), model) for stage in stages]
    places = [at for rank in range(RANKS) if (at := placement.coordinates(rank))]
    return [by_slot[at.dp * layout.cp + at.cp] for at in places], [by_stage[at.pp] for at in places]


def _rank(rank: int, _: dist.Store, options: argparse.Namespace) -> None:
    batch = _batch(rank, options.rows // RANKS, options.tokens)
    index = RowIndexer().index(batch)
    placement = Placement.on(Layout.parse(options.layout), RANKS)
    rows, parts = _wanted(index, placement)
    ways: dict[str, Callable[[], object]] = {
        "all columns, all-to-all": lambda: _gather_by_all_to_all(batch, index, rows),
        "columns of the stage, plan": lambda: gather_rows(batch, index, rows, parts),
    }
    seconds = medians(seconds_in_turn(ways, options.rounds))
    if rank == 0:
        whole = sum(sum(row_bytes(index, wanted, whole_columns(index.schema))) for wanted in rows)
        planned = sum(d.num_bytes * len(d.hops) for d in plan_deliveries(index, rows, parts, RANKS))
        for (name, median), size in zip(seconds.items(), (whole, planned), strict=True):
            print(f"{name:28} {median:6.2f} s   {size / 1e6:8.1f} MB")


def _batch(rank: int, rows: int, tokens: int) -> Batch:
    batch = Batch([tokens] * rows)
    batch["sample_id"] = torch.arange(rank * rows, (rank + 1) * rows)
    batch["tokens"], batch["loss_mask"] = batch.positions, batch.positions > 0
    batch["routed_experts"] = torch.ones(batch.total_tokens, LAYERS, TOP_K, dtype=torch.int16)
    return batch


def _gather_by_all_to_all(batch: Batch, index: RowIndex, wanted: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Sends whole rows from their owners to every rank that wants them."""
    rank, names = dist.get_rank(), list(index.schema)
    chosen = [batch.select([index.local_row[row] for row in rows if index.owner_rank[row] == rank]) for rows in wanted]
    outgoing = [torch.cat([part[name].contiguous().view(torch.uint8).reshape(-1) for name in names]) for part in chosen]
    return all_to_all_bytes(outgoing)


if __name__ == "__main__":
    main()
