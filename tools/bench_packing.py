"""Balance of rows over data-parallel ranks, on recorded lengths, for 8 to 512 ranks.

    python -m tools.bench_packing [--model tools/model_configs/qwen3_235b_a22b.json] [--longest 16384]

Three ways with the same rows, the same budget of tokens, and the same predicted FLOPs:

    packed     as in training: rows are packed first, then micro-batches are distributed by FLOPs
    tokens     rows are distributed so that ranks have equally many tokens, then each rank packs its rows
    in order   equally many rows for each rank, in their order, packed in that order

imbalance: FLOPs of the busiest rank over the mean. bound: the least imbalance possible, that of the costliest row.
lockstep: imbalance where ranks wait for each other after every micro-batch, as with expert parallelism.
padding: tokens that make micro-batches a multiple of tp * cp, as a share of all tokens.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path

from verl_mg.layout.packing import pack
from verl_mg.models.flops import row_flops
from verl_mg.models.hf_config import read_config
from verl_mg.planner.lengths import longest_to, read_lengths
from verl_mg.sharding.weight_table import weight_table

HERE = Path(__file__).parent
Shares = list[list[list[int]]]
Way = Callable[[Sequence[int], Sequence[float], int, int], Shares]


def main() -> None:
    """Prints the table of all numbers of ranks and ways."""
    options = _options()
    rows = longest_to(read_lengths(options.lengths), options.longest)
    lengths = [row.total for row in rows]
    table = weight_table(read_config(options.model))
    flops = row_flops(table.config, table.tensor_index)
    costs = [flops(length) for length in lengths]
    budget = options.budget or options.longest
    print(
        f"{options.model.stem}: {len(lengths)} rows of {sum(lengths):,} tokens, the longest {max(lengths):,}; ", end=""
    )
    print(f"micro-batches of up to {budget:,} tokens, tp * cp = {options.parts}")
    print(
        f"{'ranks':>5} {'way':9} {'imbalance':>9} {'lockstep':>9} {'bound':>7} {'padding':>8} {'micro-batches':>14} s"
    )
    for ranks in (8, 16, 32, 64, 128, 256, 512):
        for name, way in WAYS.items():
            begin = time.perf_counter()
            shares = way(lengths, costs, ranks, budget)
            seconds = time.perf_counter() - begin
            print(f"{ranks:5} {name:9} {_measure(shares, lengths, costs, options.parts)} {seconds:.2f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "model_configs" / "qwen3_235b_a22b.json")
    parser.add_argument("--lengths", type=Path, default=HERE / "lengths" / "random_qwen3_4096.txt")
    parser.add_argument("--longest", type=int, default=16384, help="lengths are scaled until the longest has so many")
    parser.add_argument("--budget", type=int, help="tokens of a micro-batch (default: as many as the longest row has)")
    parser.add_argument("--parts", type=int, default=16, help="tp * cp")
    return parser.parse_args()


def _measure(shares: Shares, lengths: Sequence[int], costs: Sequence[float], parts: int) -> str:
    done = sorted(row for share in shares for micro in share for row in micro)
    assert done == list(range(len(lengths))), "every row once"
    mean = sum(costs) / len(shares)
    busiest = max(sum(costs[row] for micro in share for row in micro) for share in shares)
    steps = zip_longest(*shares, fillvalue=[])
    lockstep = sum(max(sum(costs[row] for row in micro) for micro in step) for step in steps)
    most = max(len(share) for share in shares)
    tokens = [sum(lengths[row] for row in micro) for share in shares for micro in share]
    filler = sum(-each % parts if each else parts for each in tokens)
    filler += parts * (most * len(shares) - len(tokens))  # ranks with fewer micro-batches run empty ones
    return (
        f"{busiest / mean:9.3f} {lockstep / mean:9.3f} {max(1.0, max(costs) / mean):7.3f} "
        f"{filler / sum(lengths):8.3%} {most:14}"
    )


def _by_tokens(lengths: Sequence[int], costs: Sequence[float], ranks: int, budget: int) -> Shares:
    heap = [(0, rank) for rank in range(ranks)]
    rows: list[list[int]] = [[] for _ in range(ranks)]
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens, rank = heap[0]
        heapq.heapreplace(heap, (tokens + lengths[row], rank))
        rows[rank].append(row)
    return [_filled(rank_rows, lengths, budget) for rank_rows in rows]


def _in_order(lengths: Sequence[int], costs: Sequence[float], ranks: int, budget: int) -> Shares:
    count = len(lengths)
    return [
        _filled(range(count * rank // ranks, count * (rank + 1) // ranks), lengths, budget) for rank in range(ranks)
    ]


def _filled(rows: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First fit: puts each row into the first micro-batch with enough free tokens."""
    micro_batches: list[list[int]] = []
    tokens: list[int] = []
    for row in rows:
        place = next((i for i, sum_ in enumerate(tokens) if sum_ + lengths[row] <= budget), len(tokens))
        if place == len(tokens):
            micro_batches.append([])
            tokens.append(0)
        micro_batches[place].append(row)
        tokens[place] += lengths[row]
    return micro_batches


WAYS: dict[str, Way] = {"packed": pack, "tokens": _by_tokens, "in order": _in_order}

if __name__ == "__main__":
    main()
