"""Compares gloo groups that share one event loop with torch's, one loop for each group, in turn.

    python -m tools.bench.bench_gloo [--groups 30] [--rounds 3] [--seconds 3]

Two processes create the groups. Idle: share of a core that a process uses while it sleeps. All-reduce: microseconds of
one element in one of the groups. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl_mg.distributed.world import share_event_loop

RANKS, REPEATS = 2, 1000


def main() -> None:
    options = _arguments()
    results: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for _ in range(options.rounds):
        for shared, measured in results.items():
            measured.append(_measure(shared, options.groups, options.seconds))
    medians = {
        shared: [statistics.median(values) for values in zip(*got, strict=True)] for shared, got in results.items()
    }
    for shared, name in ((True, "one event loop"), (False, "one for each group")):
        idle, microseconds = medians[shared]
        print(f"{name:20} idle {100 * idle:5.2f} % of a core   all-reduce {microseconds:5.0f} us")
    idle, microseconds = (theirs / ours for ours, theirs in zip(medians[True], medians[False], strict=True))
    print(f"one for each group against one: {idle:.1f} times the idle load, {microseconds:.2f} times the all-reduce")


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of sleep")
    return parser.parse_args()


def _measure(shared: bool, groups: int, seconds: float) -> tuple[float, float]:
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        arguments = (Path(folder) / "store", shared, groups, seconds, queue)
        processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        result: tuple[float, float] = queue.get(timeout=120)
        for process in processes:
            process.join()
    return result


def _rank(rank: int, store: Path, shared: bool, groups: int, seconds: float, queue: Any) -> None:
    torch.set_num_threads(1)
    if shared:
        share_event_loop()
    dist.init_process_group("gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS)
    created = [dist.new_group(backend="gloo") for _ in range(groups)]
    number = torch.zeros(1)
    for group in created:
        dist.all_reduce(number, group=group)
    used = time.process_time()
    time.sleep(seconds)
    idle = (time.process_time() - used) / seconds
    dist.barrier()
    start = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(number, group=created[0])
    microseconds = 1e6 * (time.perf_counter() - start) / REPEATS
    if rank == 0:
        queue.put((idle, microseconds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
