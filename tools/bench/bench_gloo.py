"""Compares gloo groups that share one event loop with torch's, one loop for each group, in turn.

    python -m tools.bench.bench_gloo [--groups 30] [--rounds 3] [--seconds 3]

Two processes create the groups. Idle: share of a core that a process uses while it sleeps. All-reduce: microseconds of
one element in one of the groups. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

from tools.bench.harness import on_ranks, options_of
from verl_mg.distributed.world import share_event_loop

RANKS, REPEATS = 2, 1000


def main() -> None:
    options = options_of(__doc__, groups=30, rounds=3, seconds=3).parse_args()
    results: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for _ in range(options.rounds):
        for shared, measured in results.items():
            queue = get_context("spawn").SimpleQueue()
            on_ranks(RANKS, _rank, options, queue, before=share_event_loop if shared else None)
            measured.append(queue.get())
    middle = {shared: list(map(statistics.median, zip(*got, strict=True))) for shared, got in results.items()}
    for shared, name in ((True, "one event loop"), (False, "one for each group")):
        idle, microseconds = middle[shared]
        print(f"{name:20} idle {100 * idle:5.2f} % of a core   all-reduce {microseconds:5.0f} us")
    idle, microseconds = (theirs / ours for ours, theirs in zip(middle[True], middle[False], strict=True))
    print(f"one for each group against one: {idle:.1f} times the idle load, {microseconds:.2f} times the all-reduce")


def _rank(rank: int, _: dist.Store, options: argparse.Namespace, queue: Any) -> None:
    created = [dist.new_group(backend="gloo") for _ in range(options.groups)]
    number = torch.zeros(1)
    for group in created:
        dist.all_reduce(number, group=group)
    used = time.process_time()
    time.sleep(options.seconds)
    idle = (time.process_time() - used) / options.seconds
    dist.barrier()
    start = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(number, group=created[0])
    if rank == 0:
        queue.put((idle, 1e6 * (time.perf_counter() - start) / REPEATS))


if __name__ == "__main__":
    main()
