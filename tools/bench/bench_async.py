"""Trained tokens per second of asynchronous and synchronous runs, where lengths have a heavy tail.

    python -m tools.bench.bench_async [--iterations 40] [--rounds 1] [--prompts 16] [--tokens 1024] [--staleness 4]

GRPO on `heavy_tail_task.py` with SGLang, two ranks with one thread each, in three ways, in turn: synchronous with
an engine on each rank (all memory of both ranks for generation, then for training), synchronous with one rank for
training and one for an engine, and asynchronous with the same ranks. Prints the median of the rounds for each, and how
often asynchronous is the better of the other two. Iterations before the third are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from tools.bench import heavy_tail_task

WARM_UP = 2
NUM_RANKS = ["rollout.num_ranks=1"]


def main() -> None:
    """Print each run, the medians and the ratio."""
    options = _options()
    ways = {
        "synchronous, engines on both ranks": [],
        "synchronous, an engine on a separate rank": NUM_RANKS,
        "asynchronous": [*NUM_RANKS, "rollout.mode=async", f"rollout.max_staleness={options.staleness}"],
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder)
        heavy_tail_task.make(task, options.hidden, options.layers, options.tokens + 8)
        for number in range(options.rounds):
            for name, overrides in ways.items():
                run = task / f"run-{len(speeds[name])}-{list(ways).index(name)}"
                settings = [*overrides, *_settings(options, seed=number)]
                lines = heavy_tail_task.train("grpo", task, run, settings, options.iterations, WARM_UP)
                tokens = sum(line["response/length"] * line["response/samples"] for line in lines)
                speeds[name].append(tokens / sum(line["time/iteration"] for line in lines))
                print(f"{name}: {speeds[name][-1]:.0f} tokens/s, {_extra(lines)}", flush=True)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    *synchronous, asynchronous = medians.values()
    for name, value in medians.items():
        print(f"{name:45} {value:7.0f} tokens/s")
    print(f"asynchronous over the faster synchronous run: {asynchronous / max(synchronous):.2f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"iterations": 40, "rounds": 1, "prompts": 16, "tokens": 1024, "staleness": 4, "hidden": 64, "layers": 2}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def _settings(options: argparse.Namespace, seed: int) -> list[str]:
    return [
        f"rollout.max_new_tokens={options.tokens}",
        f"algorithm.prompts_per_iteration={options.prompts}",
        "algorithm.group_size=4",
        f"job.seed={seed}",
    ]


def _extra(lines: list[dict[str, float]]) -> str:
    """Returns what a run was like: mean length, idle seconds and staleness."""
    mean = {name: statistics.mean(line.get(name, 0.0) for line in lines) for name in lines[-1]}
    parts = [f"mean length {mean['response/length']:.0f}, {mean['time/iteration']:.2f} s an iteration"]
    if "time/engine_idle" in mean:
        ages = {age: mean.get(f"rollout/staleness_{age}", 0.0) for age in range(9)}
        parts.append(f"engine idle {mean['time/engine_idle']:.0%}, trainer {mean['time/trainer_idle']:.2f} s")
        parts.append("tokens by staleness " + " ".join(f"{age}:{share:.0%}" for age, share in ages.items() if share))
    return ", ".join(parts)


if __name__ == "__main__":
    main()
