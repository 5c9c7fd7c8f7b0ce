"""CPU seconds in which one rank plans a weight sync of DeepSeek-V3, for jobs of up to 4,096 ranks.

    python -m tools.bench.bench_plan [--ranks 64,1024,4096] [--repeats 3]

The job is that of `simulate_control`. `plan and schedule` are the moves of all tensors as one schedule, `in chunks` is
what a job calls: `plan_transfer` with chunks of a GiB. No process is started: each rank plans by itself, and this is
rank 0. Objects that exist before are left out of garbage collections, as in a job.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from tools.bench.simulate_control import CONFIG, NODE, SimulatedJob
from verl_mg.layout import EngineLayout, Layout
from verl_mg.models.hf_config import read_config
from verl_mg.reshard import plan, schedule
from verl_mg.sharding.weight_table import weight_table
from verl_mg.weight_sync.transfer_plan import plan_transfer

LAYOUT, ENGINES = "tp8-pp16-ep8-etp1", "tp32-ep32-adp32"


def main() -> None:
    """Prints a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,1024,4096", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs, of which the median counts (default: 3)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"{'ranks':>6} {'shard maps':>11} {'plan and schedule':>18} {'in chunks':>10}")
    for ranks in map(int, options.ranks.split(",")):
        rows = [_seconds(ranks) for _ in range(options.repeats)]
        maps, whole, chunks = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{ranks:>6} {maps:>11.2f} {whole:>18.2f} {chunks:>10.2f}", flush=True)
    dist.destroy_process_group()


def _seconds(ranks: int) -> tuple[float, float, float]:
    """CPU seconds of the shard maps, of one schedule, and of a job's chunks."""
    table = weight_table(read_config(CONFIG))

    def maps() -> SimulatedJob:
        return SimulatedJob(table, ranks, Layout.parse(LAYOUT), EngineLayout.parse(ENGINES))

    of_maps = _timed(maps)
    # New maps for each, since they keep what a plan has looked up.
    first, second = maps(), maps()
    target, other_target = (table.shard_map_engine(job.engines) for job in (first, second))
    one_engine = first.engines.ranks[: first.engines.layout.ranks]
    of_whole = _timed(lambda: schedule(plan(first.source, target, NODE), 0, torch.bfloat16))
    of_chunks = _timed(
        lambda: plan_transfer(second.source, other_target, torch.bfloat16, sized_by=one_engine, ranks_per_node=NODE)
    )
    return of_maps, of_whole, of_chunks


def _timed(function: Callable[[], object]) -> float:
    gc.collect()
    gc.freeze()
    begin = time.process_time()
    function()
    return time.process_time() - begin


if __name__ == "__main__":
    main()
