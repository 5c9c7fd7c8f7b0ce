"""Seconds of planning without starting ranks: one rank of DeepSeek-V3 on 1,024, all ranks of Qwen3-235B on 256.

    python -m tools.bench.bench_plan

Each figure is the median of several runs, and includes reading config.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.models.hf_config import read_config
from verl_mg.reshard import Plan, plan, schedule
from verl_mg.sharding.weight_table import weight_table

CONFIGS = Path(__file__).parents[1] / "model_configs"
REPEATS, NODE = 5, 8


def make_plan(model: str, train: str, rollout: str, ranks: int) -> Plan:
    """The plan of a colocated sync."""
    weights, everyone = weight_table(read_config(CONFIGS / f"{model}.json")), tuple(range(ranks))
    source = weights.shard_map_megatron(Placement(Layout.parse(train).fit(ranks), everyone))
    return plan(source, weights.shard_map_engine(EnginePlacement(EngineLayout.parse(rollout), everyone)), NODE)


def one_rank(rollout: str) -> str:
    """A rank's moves and messages for DeepSeek-V3 on 1,024 ranks."""
    moved = make_plan("deepseek_v3", "tp8-pp16-ep8-etp1", rollout, 1024)
    result = schedule(moved, 517, torch.bfloat16)
    messages = sum(len(bucket.messages) for bucket in result.buckets)
    return f"{messages} messages, {result.bytes_received / 2**30:.1f} GiB"


def all_ranks() -> str:
    """The bytes of every rank for Qwen3-235B on 256 ranks."""
    traffic = make_plan("qwen3_235b_a22b", "tp4-pp4-ep8", "tp8-ep8", 256).traffic(itemsize=2)
    return f"{max(rank.received for rank in traffic.values()) / 2**30:.1f} GiB on the worst rank"


def report(name: str, work: Callable[[], str]) -> None:
    """One line: the median of the repeats."""
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - begin)
    print(f"{name:58} {statistics.median(seconds):7.2f} s   {result}")


if __name__ == "__main__":
    report("DeepSeek-V3, 1,024 ranks -> tp8-ep8, one rank", lambda: one_rank("tp8-ep8"))
    report("DeepSeek-V3, 1,024 ranks -> tp32-ep32-adp32, one rank", lambda: one_rank("tp32-ep32-adp32"))
    report("Qwen3-235B, 256 ranks -> tp8-ep8, bytes of all ranks", all_ranks)
