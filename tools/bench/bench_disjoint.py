"""Measures a PPO iteration with actor and critic on different ranks, concurrent and sequential.

    python -m tools.bench.bench_disjoint [--hidden 256] [--layers 4] [--prompts 48] [--tokens 48] [--rounds 5]

Two ranks over gloo with one thread each: the actor on rank 0, critic and reference on rank 1, engines on both.
Iterations of recipes/ppo.py alternate between two modes in the same processes: with `concurrent_roles` blocks, and with
every role call complete when it returns. The medians are compared.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tools.bench import wide_repeat_digit
from verl_mg.config import load_config
from verl_mg.job.job import RunningJob
from verl_mg.job.recipe import load_recipe
from verl_mg.run.loop import one_iteration


def main() -> None:
    """Print both medians and their ratio."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        wide_repeat_digit.make(Path(folder), options.hidden, options.layers)
        multiprocessing.spawn(_rank, (Path(folder), options), nprocs=2)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"hidden": 256, "layers": 4, "prompts": 48, "tokens": 48, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def _rank(rank: int, folder: Path, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=2)
    recipe = load_recipe(wide_repeat_digit.RECIPES / "ppo.py")
    placement = ["actor.ranks=0", "critic.ranks=1", "reference.ranks=1"]
    task = wide_repeat_digit.overrides(folder, "ppo", options.prompts, options.tokens)
    config = load_config(None, [*task, *placement], recipe.config)
    job = RunningJob(config, recipe.roles(config.algorithm), store)
    job.start()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    concurrent = job.context.executor.concurrent
    for iteration in range(2 * (options.rounds + 1)):
        at_once = iteration % 2 == 0
        job.context.executor.concurrent = concurrent if at_once else nullcontext  # type: ignore[method-assign]
        dist.barrier()
        started = time.perf_counter()
        one_iteration(recipe, job, iteration + 1)
        dist.barrier()
        seconds[at_once].append(time.perf_counter() - started)
    if rank == 0:
        _print_result(statistics.median(seconds[True][1:]), statistics.median(seconds[False][1:]))
    dist.destroy_process_group()


def _print_result(concurrent: float, sequential: float) -> None:
    print(
        f"one PPO iteration, actor and critic on disjoint ranks: concurrent {concurrent:.2f} s, "
        f"sequential {sequential:.2f} s, ratio {concurrent / sequential:.2f}"
    )


if __name__ == "__main__":
    main()
