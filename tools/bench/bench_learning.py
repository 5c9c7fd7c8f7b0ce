"""Reward curves of GRPO on recipes/tasks/repeat_digit.py, in ways that differ in one key, over several seeds.

    python -m tools.bench.bench_learning support|centering [--seeds 5] [--iterations 60]

Draws are with `rollout.top_p=0.9`. support: trained on their candidates or on the whole vocabulary, with the hf engine
in one process of one thread. centering: asynchronous with SGLang, two ranks with one thread each, weights up to 4
updates old and a doubled learning rate, so that they differ: without correction, with token weights, with score
centering, and with both. Prints the mean reward of each sixth of the run, with the standard deviation over the seeds,
and the largest mean |log-prob of the trainer - of the engine| of an iteration.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store

from tools.bench.harness import on_ranks, options_of
from verl_mg.config import load_config
from verl_mg.distributed.world import World
from verl_mg.job.recipe import load_recipe
from verl_mg.recipes.tasks import repeat_digit
from verl_mg.run.loop import FULL_RUN, train

RECIPES = Path(__file__).parents[2] / "recipes"
STALE = ["rollout.engine=sglang", "rollout.num_ranks=1", "rollout.mode=async", "rollout.max_staleness=4"]
COMMON = {"support": [], "centering": [*STALE, "actor.optimizer.lr=0.006"]}
"""Overrides of every way, by comparison."""
WEIGHT, CENTERING = "algorithm.off_policy.weight=token", "algorithm.off_policy.score_centering=8"
WAYS = {
    "support": {"sampled": [], "full": ["algorithm.support=full"]},
    "centering": {"none": [], "weights": [WEIGHT], "centering": [CENTERING], "both": [WEIGHT, CENTERING]},
}
RANKS = {"support": 1, "centering": 2}
PARTS = 6  # of a run, in the table
Lines = list[dict[str, float]]


def main() -> None:
    """Run all ways with all seeds and print the table."""
    parser = options_of(__doc__, seeds=5, iterations=60)
    parser.add_argument("comparison", choices=sorted(WAYS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        repeat_digit.make(folder)
        on_ranks(RANKS[options.comparison], _train_all, folder, options.comparison, options.seeds, options.iterations)
        step = max(options.iterations // PARTS, 1)
        ends = range(step, options.iterations + 1, step)
        print(f"| way | {' | '.join(f'to {end}' for end in ends)} | mismatch |\n|{'---|' * (len(ends) + 2)}")
        for way in WAYS[options.comparison]:
            runs = [_lines(folder / f"{way}-{seed}") for seed in range(options.seeds)]
            cells = [_cell([_mean_reward(lines[end - step : end]) for lines in runs]) for end in ends]
            mismatch = max(line["mismatch/mean_abs"] for lines in runs for line in lines)
            print(f"| {way} | {' | '.join(cells)} | {mismatch:.1e} |")


def _train_all(rank: int, store: Store, folder: Path, comparison: str, seeds: int, iterations: int) -> None:
    recipe = load_recipe("grpo")
    for seed in range(seeds):
        for way, overrides in WAYS[comparison].items():
            run = f"{way}-{seed}"
            settings = [
                f"model.path={folder / 'model'}",
                f"data.train={folder / 'data' / 'train.jsonl'}",
                f"data.test={folder / 'data' / 'test.jsonl'}",
                "rollout.top_p=0.9",
                *COMMON[comparison],
                *overrides,
                *(f"job.{key}" for key in (f"seed={seed}", f"output={folder / run}", f"iterations={iterations}")),
                *("job.save=false", "job.console=false", "checkpoint.every=0", "record.samples_per_rank=0"),
            ]
            file = RECIPES / "configs" / "repeat_digit" / "grpo.yaml"
            config = load_config(file, settings, recipe.config)
            train(recipe, config, World(rank, RANKS[comparison], dist.PrefixStore(run, store)), FULL_RUN)


def _lines(run: Path) -> Lines:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward/mean" in line]


def _mean_reward(lines: Lines) -> float:
    return statistics.mean(line["reward/mean"] for line in lines)


def _cell(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.2f}"


if __name__ == "__main__":
    main()
