"""Compares the start of a job with that of another folder's code: seconds to the first iteration, and memory of a rank.

    python -m tools.bench.bench_start [--baseline FOLDER] [--engines hf sglang] [--ranks 2] [--rounds 3]

Each run is a GRPO job of a tiny model on CPU ranks, started by `python -m verl_mg.launch`; the sides take turns. The
first iteration begins where the recipe is called. "processor" is the CPU time of all processes up to there, which other
work on the machine changes less; "private" is the memory of a rank that no other process shares, and "proportional"
with its share of what others use too. Medians over the rounds, of ranks the larger one. The phases are from
start.json of the last round.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tools.bench.harness import options_of
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.run.start_table import START

ROOT = Path(__file__).parents[2]
CHARACTERS = "0123456789+="
RECIPE = """
import json, os, time
from pathlib import Path

import psutil

from verl_mg.recipes.grpo import Config, roles
from verl_mg.recipes.grpo import iteration as of_grpo


def iteration(job, cfg):
    begun = time.time()
    memory = psutil.Process().memory_full_info()
    file = Path(os.environ["BENCH_START"]) / os.environ["RANK"]
    file.with_suffix(".new").write_text(json.dumps({"begun": begun, "private": memory.uss, "proportional": memory.pss}))
    file.with_suffix(".new").rename(file)
    return of_grpo(job, cfg)
"""
MIB = 2**20


def main() -> None:
    """Prints a table for each engine."""
    parser = options_of(__doc__, ranks=2, rounds=3)
    parser.add_argument("--baseline", type=Path, help="folder of the code to compare with")
    parser.add_argument("--engines", nargs="+", default=["hf"], choices=("hf", "sglang"))
    options = parser.parse_args()
    sides = {"before": options.baseline, "now": ROOT} if options.baseline else {"now": ROOT}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        for engine in options.engines:
            runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for number in range(options.rounds):
                for side, code in sides.items():
                    output = folder / f"{engine}-{side}-{number}"
                    runs[side].append(start(folder, code, output, engine, options.ranks))
            _report(engine, runs)
            _print_phases(folder / f"{engine}-now-{options.rounds - 1}" / "run" / START)


def write_inputs(folder: Path) -> None:
    """Writes model, prompts and recipe."""
    make_tiny_model(folder / "model", "qwen3", characters=CHARACTERS, hidden=64, layers=2, ffn=128)
    sums = ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(4))
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in sums))
    (folder / "recipe.py").write_text(RECIPE)


def start(folder: Path, code: Path, output: Path, engine: str, ranks: int) -> dict[str, float]:
    """Runs a job of one iteration and returns what was measured where its recipe was called first."""
    output.mkdir()
    words = [
        *("-m", "verl_mg.launch", "--nproc-per-node", str(ranks), "-m", "verl_mg", "train", str(folder / "recipe.py")),
        *(f"model.path={folder / 'model'}", f"data.train={folder / 'sums.jsonl'}", f"job.output={output / 'run'}"),
        *("job.iterations=1", "job.save=false", "checkpoint.every=0", f"rollout.engine={engine}"),
        *("algorithm.prompts_per_iteration=4", "algorithm.group_size=2", "rollout.max_new_tokens=6"),
        *("reward.function=verl_mg.rewards.exact:score", "model.dtype=float32"),
        # Other work on the machine may take memory while an engine starts.
        *(
            ["rollout.sglang.mem_fraction_static=0.3", "rollout.sglang.max_total_tokens=4096"]
            if engine == "sglang"
            else []
        ),
    ]
    environment = os.environ | {"PYTHONPATH": str(code), "BENCH_START": str(output)}
    begun = time.time()
    with (output / "log").open("wb") as log:
        job = subprocess.Popen([sys.executable, *words], cwd=code, env=environment, stdout=log, stderr=log)
        files = [output / str(rank) for rank in range(ranks)]
        while job.poll() is None and not all(file.exists() for file in files):
            time.sleep(0.02)
        processor = sum(_processor_seconds(job.pid))
        if job.wait():
            raise SystemExit(f"{output / 'log'}:\n{(output / 'log').read_text()}")
    of_ranks: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]
    return {
        "seconds": max(rank["begun"] for rank in of_ranks) - begun,
        "processor": processor,
        "private": max(rank["private"] for rank in of_ranks) / MIB,
        "proportional": max(rank["proportional"] for rank in of_ranks) / MIB,
    }


def _processor_seconds(pid: int) -> Iterator[float]:
    """Yields the CPU seconds of a process and of all below it, those that have ended included."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                yield sum(each.cpu_times()[:4])


def _report(engine: str, runs: dict[str, list[dict[str, float]]]) -> None:
    units = {"seconds": "s", "processor": "s", "private": "MiB", "proportional": "MiB"}
    print(f"engine {engine}".ljust(16), *(f"{name}, {unit}".rjust(18) for name, unit in units.items()))
    medians = {
        side: {name: statistics.median(run[name] for run in of_side) for name in units}
        for side, of_side in runs.items()
    }
    for side, values in medians.items():
        print(side.ljust(16), *(f"{values[name]:18.1f}" for name in units))
    if "before" in medians:
        ratios = (medians["now"][name] / medians["before"][name] for name in units)
        print("ratio".ljust(16), *(f"{ratio:18.2f}" for ratio in ratios))
    print(flush=True)


def _print_phases(file: Path) -> None:
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    for section in ("start", "fullest rank"):
        print(section, *(f"  {row['part']:<24}{row['chosen']}" for row in rows.get(section, ())), sep="\n", flush=True)
    print()


if __name__ == "__main__":
    main()
