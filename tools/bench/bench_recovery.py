"""Seconds from the loss of a trainer rank to the next iteration: restart by the launcher, and of the whole job.

    python -m tools.bench.bench_recovery [--rounds 3] [--iteration 3] [--hidden 64] [--layers 2] [--no-job]

PPO with actor, critic and reference on four ranks, and SGLang on a fifth one. One of the four ranks is ended by
SIGKILL in the middle of an iteration, in three ways, in turn: under `--max-restarts`, where the launcher starts the
ranks again and the engine continues, with the actor's weights from the engine, and as users start it; and without,
where the job ends with an error and the same command is started again (not with `--no-job`). Prints the seconds until
the job has logged one more iteration than before, what the job says of the source of the actor's weights, medians, and
the ratios of all medians to the first. It ends with an error if the engine's processes are not the same ones after a
restart by the launcher.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tools.bench import heavy_tail_task

RECIPE = Path(__file__).parents[2] / "recipes" / "ppo.py"
RANKS, VICTIM = 5, 2
WAYS = ENGINES, CHOSEN, JOB = "weights of the engines", "restart by the launcher", "restart of the job"
POLL_SECONDS = 0.02
PATIENCE_SECONDS = 900.0
AFTER_SECONDS = 0.3
"""Time from the end of an iteration to the loss."""


def main() -> None:
    """Prints each recovery, the medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iteration", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--no-job", action="store_true")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS if way != JOB or not options.no_job}
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder)
        heavy_tail_task.make(task, options.hidden, options.layers, 72)
        for number in range(options.rounds):
            for way, values in seconds.items():
                run = task / f"run-{number}-{way.replace(' ', '-')}"
                values.append(_recovery(task, run, options.iteration, way))
                print(f"{way}: {values[-1]:.1f} s; {_restored(run)}", flush=True)
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    for way, median in medians.items():
        print(f"{way}: median {median:.1f} s, {median / medians[ENGINES]:.2f} times as long as with {ENGINES}")


def _restored(run: Path) -> str:
    """Returns what the job says of the source of the actor's weights."""
    lines = (run / "output").read_text().splitlines()
    return next((line[line.index("actor: weights") :] for line in lines if "actor: weights" in line), "not restored")


def _recovery(task: Path, run: Path, iteration: int, way: str) -> float:
    """Returns the seconds from the loss of a rank until the job has logged another iteration."""
    command, restarts = _command(task, run, iteration, way), way != JOB
    job = _start(command, run)
    _wait_for(run, iteration, job)
    engine = _engine(job)
    time.sleep(AFTER_SECONDS)
    _rank(job).send_signal(signal.SIGKILL)
    started, done = time.monotonic(), _num_logged(run)
    if not restarts:
        job.wait(PATIENCE_SECONDS)
        job = _start(command, run)
    _wait_for(run, done + 1, job)
    seconds = time.monotonic() - started
    if restarts and not (engine and all(process.is_running() for process in engine) and not _engine(job)):
        raise SystemExit("the engine is another process")
    if job.wait(PATIENCE_SECONDS):
        raise SystemExit(f"the job failed: {(run / 'output').read_text()[-2000:]}")
    return seconds


def _command(task: Path, run: Path, iteration: int, way: str) -> list[str]:
    return [
        *(sys.executable, "-m", "verl_mg.launch", f"--nproc-per-node={RANKS}"),
        *(["--max-restarts=1"] if way != JOB else []),
        *("-m", "tools.bench.from_engines" if way == ENGINES else "verl_mg", "train", str(RECIPE)),
        *heavy_tail_task.task_settings(task),
        *("rollout.engine=sglang", "rollout.num_ranks=1", "rollout.max_new_tokens=32"),
        "rollout.max_running_requests=1",  # SGLang has no seeds of requests on a CPU: one after the other
        *("algorithm.prompts_per_iteration=16", "algorithm.group_size=1"),
        *("job.deterministic=true", "job.save=false", "job.console=false", f"job.iterations={iteration + 3}"),
        *("checkpoint.every=1", f"job.output={run}"),
    ]


def _start(command: list[str], run: Path) -> subprocess.Popen[bytes]:
    run.mkdir(exist_ok=True)
    with (run / "output").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def _wait_for(run: Path, iterations: int, job: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while _num_logged(run) < iterations:
        if job.poll() or time.monotonic() > until:
            raise SystemExit(f"iteration {iterations} is not reached: {(run / 'output').read_text()[-2000:]}")
        time.sleep(POLL_SECONDS)


def _num_logged(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def _rank(job: subprocess.Popen[bytes]) -> psutil.Process:
    """Returns the process of the rank that is lost: a fork with its name, or a child of the launcher."""
    children = psutil.Process(job.pid).children()
    forks = [fork for child in children for fork in child.children() if fork.name() == f"rank {VICTIM}"]
    return (forks or [child for child in children if child.environ().get("RANK") == str(VICTIM)])[0]


def _engine(job: subprocess.Popen[bytes]) -> set[psutil.Process]:
    """Returns the processes of engines that ranks of this job have started and that have not lost their rank."""
    return {p for p in psutil.Process(job.pid).children(recursive=True) if p.name().startswith("sglang::")}


if __name__ == "__main__":
    main()
