"""Seconds and memory of commands that need no job, in turn with another folder's code.

    python -m tools.bench.bench_commands [--baseline FOLDER] [--rounds 5]

Each run is a new process. "processor" is the CPU time of the process, which other work on the machine changes less than
the seconds up to its end. Medians over the rounds. A command that the other folder does not have is left out there.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.bench.harness import options_of
from verl_mg.models.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
MOE = ("--model", "tools/model_configs/qwen3_30b_a3b.json")
PAPER = "recipes/papers/dapo_qwen3_30b_a3b/config.yaml"
COMMANDS = {
    "--version": ("--version",),
    "plan --model": ("plan", *MOE, "--ranks", "16", "--train", "tp2-ep8", "--rollout", "tp4"),
    "plan RECIPE": ("plan", "recipes/dapo.py", "--config", PAPER, *MOE, "--ranks", "64"),
    "train RECIPE --help-config": ("train", "grpo", "--help-config"),
    "models DIR": ("models", "MODEL"),
    "models DIR --full": ("models", "MODEL", "--full"),
}

MEASURED = """
import atexit, sys
atexit.register(lambda: print(next(line for line in open("/proc/self/status") if "VmHWM" in line), file=sys.stderr))
from verl_mg.cli import main
main()
"""
"""Program of a command; the largest memory in `getrusage` would be that of this process, which starts it."""


def main() -> None:
    """Prints a line for each command and side."""
    parser = options_of(__doc__, rounds=5)
    parser.add_argument("--baseline", type=Path, help="folder of the code to compare with")
    options = parser.parse_args()
    sides = {"before": options.baseline, "now": ROOT} if options.baseline else {"now": ROOT}
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", "qwen3")
        print(f"{'command':28} {'side':8} {'processor':>9} {'seconds':>8} {'MiB':>6}")
        for name, words in COMMANDS.items():
            arguments = [str(model) if word == "MODEL" else word for word in words]
            runs = [{side: run(code, arguments) for side, code in sides.items()} for _ in range(options.rounds)]
            for side in sides:
                if not (of_side := [done[side] for done in runs if done[side]]):
                    continue
                processor, seconds, mib = map(statistics.median, zip(*of_side, strict=True))
                print(f"{name:28} {side:8} {processor:9.2f} {seconds:8.2f} {mib:6.0f}", flush=True)


def run(code: Path, arguments: list[str]) -> tuple[float, float, float] | None:
    """Runs a command of a folder's code; returns CPU seconds, seconds and MiB of memory, or None where it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started, silent = time.perf_counter(), subprocess.DEVNULL
    process = subprocess.Popen(
        [sys.executable, "-c", MEASURED, *arguments],
        cwd=code, env=environment | {"PYTHONPATH": str(code)}, stdout=silent, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    words = process.stderr.read().split()  # the last line is "VmHWM: 19552 kB"
    _, status, usage = os.wait4(process.pid, 0)
    seconds, process.returncode = time.perf_counter() - started, os.waitstatus_to_exitcode(status)
    if process.returncode:
        return None
    return usage.ru_utime + usage.ru_stime, seconds, int(words[-2]) / 1024


if __name__ == "__main__":
    main()
