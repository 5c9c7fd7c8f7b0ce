"""Measures the transfer of a batch's rows to the ranks of a role, and counts it for large jobs.

    python -m tools.bench_rows [--layout tp2-pp4] [--rows 64] [--tokens 4096] [--rounds 5]     8 gloo ranks
    python -m tools.bench_rows --ranks 1024                                                    on paper

On gloo ranks the rows travel in turn by the plan of `roles.row_plan` and as whole rows from their owners to every rank
of a data-parallel index in one all-to-all. The job on paper is recipes/configs/ppo_deepseek_v3.yaml: rows of engine
leaders are distributed over the ranks, then transferred for three forward passes and two updates.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from verl_mg.batch import Batch, ColumnKind
from verl_mg.distributed.collectives import all_to_all_bytes
from verl_mg.layout import Layout, Placement
from verl_mg.layout.packing import plan_evenly
from verl_mg.roles.row_dispatch import gather_rows
from verl_mg.roles.row_index import ColumnSchema, RowIndex, RowIndexer
from verl_mg.roles.row_plan import ColumnPart, Delivery, plan_deliveries, row_bytes, whole_columns

RANKS = 8
LAYERS, TOP_K, DENSE = 61, 8, 3
"""DeepSeek-V3: layers, experts of a token, and first layers without experts."""
MEAN_LENGTH = 9216
"""Half of the prompt and response that the configuration allows."""
Wanted = tuple[list[list[int]], list[list[ColumnPart]]]
"""Rows and parts of the columns that each rank receives."""


def main() -> None:
    """Prints medians of both transfers on gloo ranks, or the traffic of a rank on paper."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="tp2-pp4")
    parser.add_argument("--ranks", type=int, help="count the DeepSeek-V3 job on so many ranks")
    for name, default in {"rows": 64, "tokens": 4096, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if options.ranks:
        _print_job(options.ranks)
        return
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_rank, args=(rank, folder, options)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


def _columns(layout: Layout, stage: int, forward: bool, update: Iterable[str]) -> list[ColumnPart]:
    """Returns what `Role.columns_needed` returns for a model with the layers of DeepSeek-V3."""
    at = layout.stage(LAYERS, stage)
    names = (["tokens", "loss_mask", *([] if forward else update)]) if at.is_last else ["tokens"] if at.is_first else []
    layers = tuple(layer for layer in at.layers if layer >= DENSE)
    return [*map(ColumnPart, names), *([ColumnPart("routed_experts", layers)] if layers else [])]


def _wanted(index: RowIndex, placement: Placement, ranks: int, columns: Callable[[int], list[ColumnPart]]) -> Wanted:
    layout = placement.layout
    plan = plan_evenly(index.lengths, list(map(float, index.lengths)), layout.dp, layout.cp, 18432)
    by_slot = [[row for micro in steps for row in micro] for steps in plan.rows]
    by_stage = [columns(stage) for stage in range(layout.pp)]
    places = [placement.coordinates(rank) for rank in range(ranks)]
    rows = [by_slot[at.dp * layout.cp + at.cp] if at else [] for at in places]
    return rows, [by_stage[at.pp] if at else [] for at in places]


# -- on gloo ranks


def _rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    batch = _batch(rank, options.rows // RANKS, options.tokens)
    index = RowIndexer().index(batch)
    placement = Placement.on(Layout.parse(options.layout), RANKS)
    rows, parts = _wanted(index, placement, RANKS, lambda stage: _columns(placement.layout, stage, True, ()))
    seconds: dict[str, list[float]] = {"all columns, all-to-all": [], "columns of the stage, plan": []}
    for number in range(2 * (options.rounds + 1)):
        name, transfer = [
            ("all columns, all-to-all", lambda: _gather_by_all_to_all(batch, index, rows)),
            ("columns of the stage, plan", lambda: gather_rows(batch, index, rows, parts)),
        ][number % 2]
        dist.barrier()
        started = time.perf_counter()
        transfer()
        dist.barrier()
        seconds[name].append(time.perf_counter() - started)
    if rank == 0:
        whole = sum(sum(row_bytes(index, wanted, whole_columns(index.schema))) for wanted in rows)
        planned = sum(d.num_bytes * len(d.hops) for d in plan_deliveries(index, rows, parts, RANKS))
        for name, size in zip(seconds, (whole, planned), strict=True):
            print(f"{name:28} {statistics.median(seconds[name][1:]):6.2f} s   {size / 1e6:8.1f} MB")
    dist.destroy_process_group()


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
    incoming = [[row for row in wanted[rank] if index.owner_rank[row] == owner] for owner in range(RANKS)]
    sizes = [sum(row_bytes(index, rows, whole_columns(index.schema))) for rows in incoming]
    return [part.clone() for part in all_to_all_bytes(outgoing, sizes)]


# -- on paper


def _print_job(ranks: int) -> None:
    node, engine, groups, group, minibatches = 8, 32, 128, 16, 4
    placement = Placement.on(Layout.parse("tp8-pp32-ep16-etp1"), ranks)
    rows = groups * group
    lengths = tuple(MEAN_LENGTH // 2 + 37 * row * row % MEAN_LENGTH for row in range(rows))
    leaders = [row % (ranks // engine) * engine for row in range(rows)]
    owners = [next(r for r in range(ranks) if (r + 1) * groups // ranks > row // group) for row in range(rows)]
    update = [*"abcdef", "policy_versions"]
    token = {"tokens": torch.int64, "loss_mask": torch.bool, "policy_versions": torch.int64}
    token |= dict.fromkeys("abcdef", torch.float32)
    schema = {name: ColumnSchema(ColumnKind.TOKEN, dtype, ()) for name, dtype in token.items()}
    schema["routed_experts"] = ColumnSchema(ColumnKind.TOKEN, torch.int16, (LAYERS, TOP_K))

    def index(owned_by: Sequence[int], first: int, end: int) -> RowIndex:
        numbers = tuple(range(end - first))
        return RowIndex(numbers, tuple(owned_by[first:end]), numbers, lengths[first:end], (), (), schema)

    generated = index(leaders, 0, rows)
    wanted = [[row for row in range(rows) if owners[row] == rank] for rank in range(ranks)]
    _print_traffic("rollout", [(generated, (wanted, [list(whole_columns(schema))] * ranks))], node, whole=False)
    whole = index(owners, 0, rows)
    forward = _wanted(whole, placement, ranks, lambda stage: _columns(placement.layout, stage, True, update))
    _print_traffic("forward pass", [(whole, forward)], node)
    steps = []
    for step in range(minibatches):
        part = index(owners, step * rows // minibatches, (step + 1) * rows // minibatches)
        steps.append((part, _wanted(part, placement, ranks, lambda s: _columns(placement.layout, s, False, update))))
    _print_traffic("update", steps, node)


def _print_traffic(name: str, transfers: Sequence[tuple[RowIndex, Wanted]], node: int, whole: bool = True) -> None:
    started = time.perf_counter()
    plans = [(index, wanted, plan_deliveries(index, *wanted, ranks_per_node=node)) for index, wanted in transfers]
    planned = (time.perf_counter() - started) / len(plans)
    used: Counter[int] = Counter()
    owned: Counter[int] = Counter()
    old: Counter[int] = Counter()
    for index, (rows, parts), _ in plans:
        all_columns = row_bytes(index, range(len(index)), whole_columns(index.schema))
        for row, size in enumerate(all_columns):
            owned[index.owner_rank[row]] += size
        cost: dict[tuple[ColumnPart, ...], list[int]] = {}
        for rank, numbers in enumerate(rows):
            sizes = cost.setdefault(tuple(parts[rank]), row_bytes(index, range(len(index)), parts[rank]))
            used[rank] += sum(sizes[row] for row in numbers)
            if whole:
                for row in numbers:
                    old[index.owner_rank[row]] += all_columns[row]
    sent, received, across, peers = _count((delivery for *_, plan in plans for delivery in plan), node)
    total = sum(sent.values()) / 1e9
    print(f"{name}: {planned:.2f} s to plan a transfer; {total:.1f} GB, {across / 1e9:.1f} between nodes")
    if whole:
        print(f"  whole rows from the owners to every rank: {sum(old.values()) / 1e9:.0f} GB, {_of(old)}")
    for what, counter in {"computes on": used, "receives": received, "sends": sent, "owns": owned}.items():
        print(f"  a rank {what:12} {_of(counter)}")
    counts = list(map(len, peers.values()))
    print(f"  a rank exchanges with {statistics.mean(counts):.0f} ranks, at most {max(counts)}")


def _of(counter: Mapping[int, int]) -> str:
    sizes = [size / 1e6 for size in counter.values()]
    return f"at most {max(sizes):7.1f} MB, mean {statistics.mean(sizes):7.1f} of {len(sizes)} ranks"


def _count(deliveries: Iterable[Delivery], node: int) -> tuple[Counter[int], Counter[int], int, dict[int, set[int]]]:
    """Returns bytes sent and received by rank, bytes between nodes, and the peers of each rank."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    across, peers = 0, defaultdict(set)
    for delivery in deliveries:
        for sender, receiver in delivery.hops:
            sent[sender] += delivery.num_bytes
            received[receiver] += delivery.num_bytes
            across += delivery.num_bytes * (sender // node != receiver // node)
            peers[sender].add(receiver)
            peers[receiver].add(sender)
    return sent, received, across, peers


if __name__ == "__main__":
    main()
