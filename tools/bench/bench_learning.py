"""Learning curves of GRPO on the task repeat_digit in two ways, over several seeds.

    python -m tools.bench.bench_learning support|centering [--iterations 60] [--seeds 5] [--prompts 16]

support      candidates by top_p = 0.9, engine hf: log-probs of all tokens, and of the candidates
centering    asynchronous, SGLang, weights up to 4 updates old: without a correction, with token weights, with score
             centering, and with both

Each line of the table is the mean over the seeds, with the standard deviation between them: of the reward in each sixth
of the run, and over the whole run of the difference of the log-probs of engine and trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools.bench.harness import options_of
from verl_mg.recipes.tasks import repeat_digit

ROOT = Path(__file__).parents[2]
PARTS = 6
TOP_P = ["rollout.top_p=0.9", "rollout.max_mismatch=null"]
STALE = [
    *("rollout.engine=sglang", "rollout.num_ranks=1", "rollout.mode=async", "rollout.max_staleness=4"),
    # Updates large enough that policies four updates apart differ.
    "actor.optimizer.lr=0.006",
]
WEIGHT, CENTERING = "algorithm.off_policy.weight=token", "algorithm.off_policy.score_centering=8"
COMPARISONS: dict[str, dict[str, Sequence[str]]] = {
    "support": {"full": [*TOP_P, "algorithm.support=full"], "sampled": TOP_P},
    "centering": {
        "none": STALE,
        "token weights": [*STALE, WEIGHT],
        "score centering": [*STALE, CENTERING],
        "both": [*STALE, WEIGHT, CENTERING],
    },
}


def main() -> None:
    """Prints each run and the table."""
    parser = options_of(__doc__, iterations=60, seeds=5, prompts=16)
    parser.add_argument("comparison", choices=COMPARISONS)
    options = parser.parse_args()
    runs: dict[str, list[list[float]]] = {name: [] for name in COMPARISONS[options.comparison]}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            task = Path(folder) / f"task-{seed}"
            repeat_digit.make(task, seed)
            # In turn, so that what else the machine does meets all ways alike.
            for number, (name, overrides) in enumerate(COMPARISONS[options.comparison].items()):
                lines = _run(options, task, Path(folder) / f"run-{seed}-{number}", [*overrides, f"job.seed={seed}"])
                runs[name].append(list(_row(lines)))
                print(f"seed {seed}, {name}: " + " ".join(f"{value:.3g}" for value in runs[name][-1]), flush=True)
    print(f"\n| | {' | '.join(f'reward, part {part + 1}' for part in range(PARTS))} | mean_abs | k3 |")
    print(f"|---|{'---|' * (PARTS + 2)}")
    for name, rows in runs.items():
        print(f"| {name} | {' | '.join(_with_deviation(column) for column in zip(*rows, strict=True))} |")


def _run(options: argparse.Namespace, task: Path, output: Path, overrides: Sequence[str]) -> list[dict[str, float]]:
    config = ROOT / "recipes/configs/repeat_digit/grpo.yaml"
    text = (
        config.read_text().replace("runs/repeat_digit/", f"{task}/").replace("recipes/tasks/", f"{ROOT}/recipes/tasks/")
    )
    file = output.with_suffix(".yaml")
    file.write_text(text)
    settings = [
        f"job.output={output}",
        f"job.iterations={options.iterations}",
        f"algorithm.prompts_per_iteration={options.prompts}",
        *("job.save=false", "job.console=false", "checkpoint.every=0", "evaluation.every=0", *overrides),
    ]
    launch = [sys.executable, "-m", "verl_mg.launch", "--nproc-per-node=2", "-m", "verl_mg", "train"]
    command = [*launch, str(ROOT / "recipes/grpo.py"), "--config", str(file), *settings]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, stdout=sys.stderr)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def _row(lines: Sequence[Mapping[str, float]]) -> Iterator[float]:
    """Yields the mean reward of each part of a run, and two means of the mismatch."""
    for part in range(PARTS):
        chosen = lines[part * len(lines) // PARTS : (part + 1) * len(lines) // PARTS]
        yield statistics.fmean(line["reward/mean"] for line in chosen)
    for name in ("mismatch/mean_abs", "mismatch/k3"):
        yield statistics.fmean(line[name] for line in lines)


def _with_deviation(values: Sequence[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3g} ± {deviation:.2g}"


if __name__ == "__main__":
    main()
