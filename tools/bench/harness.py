"""Harness of the benchmarks: options, ranks over gloo, and the seconds of ways that take turns."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def options_of(doc: str | None, **numbers: int) -> argparse.ArgumentParser:
    """A parser with the docstring of the module as help, and an option `--some-name` for each number `some_name`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser


def on_ranks(
    count: int, work: Callable[..., None], *arguments: Any, before: Callable[[], object] | None = None
) -> None:
    """Calls `work(rank, store, *arguments)` in new processes of one thread each, which gloo connects after `before`."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (count, folder, before, work, arguments), nprocs=count)


def _rank(rank: int, count: int, folder: str, before: Any, work: Callable[..., None], arguments: Any) -> None:
    torch.set_num_threads(1)
    if before:
        before()
    store = dist.FileStore(f"{folder}/store", count)
    dist.init_process_group("gloo", store=dist.PrefixStore("ranks", store), rank=rank, world_size=count)
    work(rank, store, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def seconds_in_turn(
    ways: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Runs all ways in each round, all ranks together, each after `before`; the seconds without a first round's."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way, run in ways.items():
            before()
            _meet()
            started = time.perf_counter()
            run()
            _meet()
            seconds[way].append(time.perf_counter() - started)
    return {way: values[1:] for way, values in seconds.items()}


def medians(values: Mapping[str, list[float]]) -> dict[str, float]:
    """Returns the median of the values of each way."""
    return {way: statistics.median(measured) for way, measured in values.items()}


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()
