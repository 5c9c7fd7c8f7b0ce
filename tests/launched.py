"""Jobs under a real launcher, whose ranks tests can signal, stop and kill."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.tiny_jobs import files_of, write_sums
from tests.tiny_models import tiny_model

ROOT = Path(__file__).parents[1]
LONG = 10**6
"""Iterations of a job that does not end by itself."""
PATIENCE_S = 120


def write_inputs(folder: Path) -> Path:
    """A model and sums to imitate."""
    folder.mkdir(exist_ok=True)
    tiny_model(folder / "model", "qwen3")
    write_sums(folder)
    return folder


def train_command(inputs: Path, output: Path, *overrides: str, recipe: str = "recipes/sft.py") -> list[str]:
    """What each rank runs, after `python`."""
    common = [
        *files_of(inputs, output),
        f"job.iterations={LONG}",
        "job.save=false",
        "algorithm.examples_per_iteration=8",
    ]
    return ["-m", "verl_mg", "train", recipe, *common, *overrides]


def watched(code: str = "pass", heartbeat_timeout_s: float = 60, stall_timeout_s: float = 0) -> list[str]:
    """The same of a job of collectives alone, see tests/distributed/watched.py."""
    return [str(ROOT / "tests" / "job" / "watched.py"), str(heartbeat_timeout_s), str(stall_timeout_s), code]


def torchrun(ranks: int, *options: str) -> list[str]:
    """Our launcher, after `python`."""
    return ["-m", "verl_mg.launch", "--nproc-per-node", str(ranks), *options]


@contextmanager
def started(
    arguments: Sequence[str], before: Sequence[str] = (), **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """`python ARGUMENTS` in the checkout, after the words `before`; whatever is left of it is ended with the test."""
    process = subprocess.Popen(
        [*before, sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    ranks: list[psutil.Process] = []
    try:
        ranks = _descendants(process)
        yield process
    finally:
        for one in [*ranks, *_descendants(process)]:
            if one.is_running():
                one.kill()
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], patience: float = PATIENCE_S) -> tuple[int, str, str]:
    """Exit code, standard output and standard error, once it has ended."""
    out, err = process.communicate(timeout=patience)
    return process.returncode, out, err


def iterations_done(output: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Wait until the job has logged so many."""
    metrics = output / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while not metrics.exists() or metrics.read_text().count("\n") < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{metrics}: fewer than {count} iterations"
        time.sleep(0.1)


def goes_on(launcher: subprocess.Popen[str]) -> None:
    """Wait until a `watched` job has done some steps."""
    assert launcher.stdout.readline() == "goes on\n"


def rank_process(launcher: subprocess.Popen[str], rank: int) -> psutil.Process:
    """The process of a rank."""
    (process,) = (one for one in psutil.Process(launcher.pid).children() if one.environ().get("RANK") == str(rank))
    return process


def error_lines(text: str) -> list[str]:
    """Those that say what was wrong."""
    return [line for line in text.splitlines() if line.startswith("error: ")]


def _descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
