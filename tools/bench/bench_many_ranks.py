"""Times a job of many ranks on this machine, from the rendezvous to the exit.

    python -m tools.bench.bench_many_ranks [--ranks 32] [--layout tp2-pp2] [--iterations 1]

The ranks are forked from one process that has imported everything, and are real otherwise: rendezvous, watchdog, gloo
groups, a Megatron model in the layout, engines of transformers on all ranks, GRPO with an update, and weight syncs from
the layout to the engines. Rank 0 prints the seconds of each phase, and counts its groups, connections and collectives.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from tools.bench import wide_repeat_digit
from verl_mg.config import Config, load_config
from verl_mg.distributed.world import World
from verl_mg.job.job import RunningJob
from verl_mg.job.recipe import Recipe, load_recipe, requested_roles
from verl_mg.run.loop import one_iteration

RECIPE = wide_repeat_digit.RECIPES / "grpo.py"
COUNTED = ("all_gather", "all_reduce", "all_to_all_single", "barrier", "broadcast", "new_group")


def main() -> None:
    options = _arguments()
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        wide_repeat_digit.make(Path(folder), hidden=32, layers=4)
        # In a separate process: a fork of one with the store's thread could inherit a lock that this thread holds.
        ours, theirs = context.Pipe()
        server = context.Process(target=_serve_store, args=(theirs,), daemon=True)
        server.start()
        port = ours.recv()
        started = time.perf_counter()
        arguments = (options, Path(folder), port, started)
        ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        print(f"{'all':12} {time.perf_counter() - started:7.1f} s   exit codes {Counter(p.exitcode for p in ranks)}")
        server.terminate()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--layout", default="tp2-pp2", help="of the actor; the reference has tp2")
    parser.add_argument("--iterations", type=int, default=1)
    return parser.parse_args()


def _serve_store(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()  # until this process is ended


def _rank(rank: int, options: argparse.Namespace, folder: Path, port: int, started: float) -> None:
    size = str(options.ranks)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    seconds: dict[str, float] = {}
    calls: Counter[str] = Counter()
    with _timed(seconds, "rendezvous", started):
        world = World.join()
    recipe = load_recipe(RECIPE)
    with world.signals.handled():
        with _timed(seconds, "build"):
            job = _job(recipe, _config(recipe, options, folder), world)
        with _timed(seconds, "first sync"):
            job.start()
        with _counted(calls), _timed(seconds, "iterations"):
            for iteration in range(options.iterations):
                one_iteration(recipe, job, iteration + 1)
        sockets = sum(c.status == psutil.CONN_ESTABLISHED for c in psutil.Process().net_connections("tcp"))
        joined = job.context.process_groups.num_joined
        with _timed(seconds, "leave"):
            job.close()
            world.shut_down()
    if rank == 0:
        for phase, value in seconds.items():
            print(f"{phase:12} {value:7.1f} s")
        print(f"rank 0: {joined} groups, {sockets} connections; in {options.iterations} iterations {dict(calls)}")


def _config(recipe: Recipe, options: argparse.Namespace, folder: Path) -> Config:
    task = wide_repeat_digit.overrides(folder, "grpo", 4 * options.ranks, 8)
    layouts = [f"actor.layout={options.layout}", "reference.layout=tp2", f"job.output={folder / 'run'}"]
    return load_config(None, [*task, *layouts, "algorithm.group_size=2"], recipe.config)


def _job(recipe: Recipe, config: Config, world: World) -> RunningJob:
    world.set_timeouts(config.job)
    job = RunningJob(config, requested_roles(recipe, config), world.store, None, True, recipe.name)
    world.watch_progress(job.timer)
    return job


@contextmanager
def _timed(seconds: dict[str, float], phase: str, started: float | None = None) -> Iterator[None]:
    started = time.perf_counter() if started is None else started
    yield
    seconds[phase] = time.perf_counter() - started


@contextmanager
def _counted(calls: Counter[str]) -> Iterator[None]:
    """Counts this rank's collectives of torch, also the calls of megatron-core."""
    originals = {name: getattr(dist, name) for name in COUNTED}

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[f"{name}{'' if options.get('group') is None else ' of a group'}"] += 1
            return original(*arguments, **options)

        return call

    vars(dist).update({name: counting(name, original) for name, original in originals.items()})
    try:
        yield
    finally:
        vars(dist).update(originals)


if __name__ == "__main__":
    main()
