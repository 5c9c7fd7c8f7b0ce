"""Trained tokens per second of asynchronous and synchronous runs, where lengths have a heavy tail.

    python -m tools.bench.bench_async [--iterations 40] [--rounds 1] [--prompts 16] [--tokens 1024] [--staleness 4]
    python -m tools.bench.bench_async --evaluate 5
    python -m tools.bench.bench_async --requests 16,64,256

GRPO on `heavy_tail_task.py` with SGLang, two ranks with one thread each, in three ways, in turn: synchronous with
an engine on each rank (all memory of both ranks for generation, then for training), synchronous with one rank for
training and one for an engine, and asynchronous with the same ranks. Prints the median of the rounds for each, and how
often asynchronous is the better of the other two. Iterations before the third are not counted.

With `--evaluate N`: the asynchronous run without and with an evaluation of as many samples as an iteration has, after
every N iterations, in turn. Tokens are of training and evaluation together; the evaluation's reward is the length.

With `--requests`: the asynchronous run with each of these numbers as `rollout.max_running_requests`, and with `auto`,
in turn; prints the ratio of `auto` to the best number.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.bench import heavy_tail_task
from tools.bench.harness import options_of

WARM_UP = 2
GROUP_SIZE = 4
NUM_RANKS = ["rollout.num_ranks=1"]
STATES = ("growing", "holding", "shrinking")


def main() -> None:
    """Print each run, the medians and the ratio."""
    parser = options_of(
        __doc__, iterations=40, rounds=1, prompts=16, tokens=1024, staleness=4, hidden=64, layers=2, evaluate=0
    )
    parser.add_argument("--requests", type=lambda text: text.split(","), default=[])
    options = parser.parse_args()
    asynchronous = [*NUM_RANKS, "rollout.mode=async", f"rollout.max_staleness={options.staleness}"]
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder)
        heavy_tail_task.make(task, options.hidden, options.layers, options.tokens + 8)
        if options.evaluate:
            evaluated = [*asynchronous, *_evaluation(options, task)]
            without, with_it = _medians(options, task, {"asynchronous": asynchronous, "with evaluations": evaluated})
            print(f"with an evaluation every {options.evaluate} iterations over without: {with_it / without:.2f}")
            return
        if options.requests:
            numbers = [*options.requests, "auto"]
            limited = {f"{n} requests": [*asynchronous, f"rollout.max_running_requests={n}"] for n in numbers}
            *fixed, auto = _medians(options, task, limited)
            print(f"auto over the best fixed number: {auto / max(fixed):.2f}")
            return
        ways = {
            "synchronous, engines on both ranks": [],
            "synchronous, an engine on a separate rank": NUM_RANKS,
            "asynchronous": asynchronous,
        }
        *synchronous, median = _medians(options, task, ways)
        print(f"asynchronous over the faster synchronous run: {median / max(synchronous):.2f}")


def _medians(options: argparse.Namespace, task: Path, ways: Mapping[str, Sequence[str]]) -> list[float]:
    """Runs all ways in turn, prints tokens per second of each run and the medians, and returns the medians."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds):
        for name, overrides in ways.items():
            run = task / f"run-{number}-{list(ways).index(name)}"
            settings = [*overrides, *_settings(options, seed=number)]
            lines = heavy_tail_task.train("grpo", task, run, settings, options.iterations, WARM_UP)
            speeds[name].append(_tokens(options, lines) / sum(map(_seconds, lines)))
            print(f"{name}: {speeds[name][-1]:.0f} tokens/s, {_extra(lines)}", flush=True)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, value in medians.items():
        print(f"{name:45} {value:7.0f} tokens/s")
    return list(medians.values())


def _settings(options: argparse.Namespace, seed: int) -> list[str]:
    return [
        f"rollout.max_new_tokens={options.tokens}",
        f"algorithm.prompts_per_iteration={options.prompts}",
        f"algorithm.group_size={GROUP_SIZE}",
        f"job.seed={seed}",
    ]


def _evaluation(options: argparse.Namespace, task: Path) -> list[str]:
    """Writes a test set whose reward is the length of an answer, and returns the settings of its evaluation."""
    prompts = (task / "train.jsonl").read_text().splitlines()
    (task / "test.jsonl").write_text("\n".join(random.Random(0).sample(prompts, options.prompts)))
    (task / "length.py").write_text("def length(sample): return float(len(sample.response))\n")
    return [
        f"data.test={{lengths: {{path: {task / 'test.jsonl'}, reward: {{function: '{task / 'length.py'}:length'}}}}}}",
        f"evaluation.every={options.evaluate}",
        f"evaluation.samples={GROUP_SIZE}",
        "evaluation.temperature=1.0",
    ]


def _tokens(options: argparse.Namespace, lines: Sequence[Mapping[str, float]]) -> float:
    """Returns the generated tokens of training and evaluations; a token is a character, or the end of an answer."""
    trained = sum(line["response/length"] * line["response/samples"] for line in lines)
    lengths = [line["eval/reward"] + 1 for line in lines if "eval/reward" in line]
    return trained + sum(lengths) * options.prompts * GROUP_SIZE


def _seconds(line: Mapping[str, float]) -> float:
    return line["time/iteration"] + line.get("time/evaluation_wait", 0.0)


def _extra(lines: list[dict[str, float]]) -> str:
    """Returns what a run was like: mean length, idle seconds and staleness."""
    names = {name for line in lines for name in line}
    mean = {name: statistics.mean(line.get(name, 0.0) for line in lines) for name in names}
    parts = [f"mean length {mean['response/length']:.0f}, {mean['time/iteration']:.2f} s an iteration"]
    if mean.get("time/evaluation_wait"):
        parts.append(f"{sum(line.get('time/evaluation_wait', 0.0) for line in lines):.1f} s of waits for evaluations")
    if "time/engine_idle" in mean:
        ages = {age: mean.get(f"rollout/staleness_{age}", 0.0) for age in range(9)}
        parts.append(f"engine idle {mean['time/engine_idle']:.0%}, trainer {mean['time/trainer_idle']:.2f} s")
        if "time/engine_limit" in mean:
            states = ", ".join(f"{state} {mean[f'time/engine_{state}']:.0%}" for state in STATES)
            parts.append(f"limit {mean['time/engine_limit']:.0f} ({states})")
        parts.append("tokens by staleness " + " ".join(f"{age}:{share:.0%}" for age, share in ages.items() if share))
    return ", ".join(parts)


if __name__ == "__main__":
    main()
