"""Measures a PPO iteration with actor and critic on different ranks, concurrent and sequential.

    python -m tools.bench.bench_disjoint [--hidden 256] [--layers 4] [--prompts 48] [--tokens 48] [--rounds 5]

Two ranks over gloo with one thread each: the actor on rank 0, critic and reference on rank 1, engines on both.
Iterations of recipes/ppo.py alternate between two modes in the same processes: with `concurrent_roles` blocks, and with
every role call complete when it returns. The medians are compared.
"""

import argparse
import itertools
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch.distributed as dist

from tools.bench import wide_repeat_digit
from tools.bench.harness import medians, on_ranks, options_of, seconds_in_turn
from verl_mg.config import load_config
from verl_mg.job.job import RunningJob
from verl_mg.job.recipe import load_recipe
from verl_mg.run.loop import one_iteration


def main() -> None:
    """Print both medians and their ratio."""
    options = options_of(__doc__, hidden=256, layers=4, prompts=48, tokens=48, rounds=5).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wide_repeat_digit.make(Path(folder), options.hidden, options.layers)
        on_ranks(2, _rank, Path(folder), options)


def _rank(rank: int, store: dist.Store, folder: Path, options: argparse.Namespace) -> None:
    recipe = load_recipe("ppo")
    placement = ["actor.ranks=0", "critic.ranks=1", "reference.ranks=1"]
    task = wide_repeat_digit.overrides(folder, "ppo", options.prompts, options.tokens)
    config = load_config(None, [*task, *placement], recipe.config)
    job = RunningJob(config, recipe.roles(config.algorithm), store)
    job.start()
    numbers, concurrent = itertools.count(1), job.context.executor.concurrent

    def iterate(block: Callable[[], AbstractContextManager[None]]) -> None:
        job.context.executor.concurrent = block  # type: ignore[method-assign]
        one_iteration(recipe, job, next(numbers))

    ways = {"concurrent": lambda: iterate(concurrent), "sequential": lambda: iterate(nullcontext)}
    seconds = medians(seconds_in_turn(ways, options.rounds))
    if rank == 0:
        print("one PPO iteration, actor and critic on disjoint ranks:")
        print(*(f"{way} {median:.2f} s" for way, median in seconds.items()), sep=", ")
        print(f"ratio {seconds['concurrent'] / seconds['sequential']:.2f}")


if __name__ == "__main__":
    main()
