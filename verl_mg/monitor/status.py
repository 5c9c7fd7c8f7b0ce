"""RUN/status.json: progress of a run, for other programs, while it is running and afterwards; the summary at the end.

    starting -- running() --> running -- __exit__ ----------------> finished
                                 +------ left(why), __exit__ -----> left        can be resumed
                                 +------ exception ---------------> failed

    rank's thread    running, left, __exit__: change the state, and write
    thread "records" log: the same
    thread "status"  _poll: writes a change of the phase or checkpoint, and every HEARTBEAT_SECONDS

A run that was killed stays "running" in the file; readers see by the time of the last write that it is dead.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from verl_mg.errors import UserError
from verl_mg.jsonl import read_lines, replacing
from verl_mg.stores.records import STATUS

if TYPE_CHECKING:  # it imports torch, and `verl-mg status` must respond immediately
    from verl_mg.phase_timer import PhaseTimer

State = Literal["starting", "running", "finished", "left", "failed"]

POLL_SECONDS = 1.0  # interval at which the phase is polled; a change is written
HEARTBEAT_SECONDS = 10.0  # interval at which the file is written without a change
SILENCE_SECONDS = 120.0  # a run that does not write for this time counts as dead
NOT_FINISHED = 3  # exit code of `verl-mg status`, for scripts that requeue a job

METRICS = "metrics.jsonl"

Line = Mapping[str, float | None]  # metrics of one step

# Number of latest iterations in the estimate: response lengths change while a policy learns.
WINDOW = 10


class EtaEstimator:
    """Estimates the time until iteration `total` is done, of which `done` ones were done before."""

    def __init__(self, total: int, done: int = 0) -> None:
        self._total, self._done = total, done
        self._since = time.monotonic()
        self._seconds: deque[float] = deque(maxlen=WINDOW)

    def update(self, done: int) -> None:
        """Records that `done` iterations are done now."""
        now = time.monotonic()
        if done > self._done:
            self._seconds.append((now - self._since) / (done - self._done))
        self._done, self._since = done, now

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end, by the median of the latest iterations; None before the first one is done."""
        if not self._seconds:
            return None
        expected = statistics.median(self._seconds) * max(self._total - self._done, 0)
        return max(0.0, expected - (time.monotonic() - self._since)) if expected else 0.0


def format_seconds(seconds: float) -> str:
    """Formats seconds as 1:02:03, or 2 days, 1:02:03."""
    return str(timedelta(seconds=round(seconds)))


def summary(lines: Sequence[Line]) -> str:
    """Summarizes the metrics of a run in a few lines; metrics that the run does not have are omitted."""
    iterations = [line for line in lines if line["step"]]  # step 0 is the evaluation before training
    seconds = sum(value for _, value in _points(iterations, "time/iteration"))
    text = [f"{len(iterations)} {'iteration' if len(iterations) == 1 else 'iterations'} in {format_seconds(seconds)}"]
    if rates := [value for _, value in _points(iterations, "time/tokens_per_second")]:
        tokens = sum(rate * time for rate, (_, time) in zip(rates, _points(iterations, "time/iteration"), strict=True))
        text.append(f"tokens/s  {tokens / seconds:.0f} on average")
    if rewards := _points(iterations, "reward/mean"):
        (first, first_value), (last, last_value) = rewards[0], rewards[-1]
        best, highest = max(rewards, key=lambda point: point[1])
        text.append(
            f"reward    {first_value:.4g} in iteration {first}, {last_value:.4g} in {last}; "
            f"best {highest:.4g} in {best}"
        )
    if evaluations := _points(lines, "eval/reward"):
        (first, first_value), (last, last_value) = evaluations[0], evaluations[-1]
        text.append(f"eval      {first_value:.4g} in iteration {first} -> {last_value:.4g} in {last}")
    return "\n".join(text)


def _points(lines: Sequence[Line], name: str) -> list[tuple[int, float]]:
    """Returns (step, value) of the lines that have the metric."""
    return [(int(line["step"] or 0), value) for line in lines if (value := line.get(name)) is not None]


@dataclass(frozen=True)
class Status:
    """Contents of the status file; `host` and `pid` are of rank 0, `started` and `updated` in Unix seconds."""

    recipe: str
    state: State  # state of the run; "left": it ended before its last iteration and can be resumed
    iteration: int  # the last iteration done
    iterations: int
    phase: str
    started: float
    updated: float
    host: str
    pid: int
    ranks: int
    tokens_per_second: float | None = None  # throughput of the last iteration
    eta_seconds: float | None = None  # seconds to the end of the last iteration
    checkpoint: int | None = None  # iteration of the last checkpoint
    message: str = ""  # reason why the run left or failed


class StatusFile:
    """Context manager that keeps the file up to date from a thread; only rank 0 writes."""

    # A run that ends with an exception has failed; otherwise it has finished, unless it `left`. If the disk is full the
    # file remains unchanged.

    def __init__(self, folder: Path, recipe: str, iterations: int, rank: int, ranks: int) -> None:
        self._path, self._writes = folder / STATUS, rank == 0
        host, pid = socket.gethostname(), os.getpid()
        self._status = Status(recipe, "starting", 0, iterations, "", time.time(), 0.0, host, pid, ranks)
        self._checkpoint: Callable[[], int | None] = lambda: None
        self._eta = EtaEstimator(iterations)
        self._phase: Callable[[], str] = lambda: ""
        self._progress: Callable[[], int] = lambda: 0
        self._progress_at = time.monotonic()
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._poll, name="status", daemon=True)

    def __enter__(self) -> StatusFile:
        self._write()
        if self._writes:
            self._thread.start()
        return self

    def running(
        self, timer: PhaseTimer, iteration: int = 0, checkpoint: Callable[[], int | None] = lambda: None
    ) -> None:
        """Sets the state "running" after `iteration` iterations; `checkpoint` returns that of the last checkpoint."""
        self._phase, self._progress, self._checkpoint = lambda: timer.phase, lambda: timer.progress, checkpoint
        self._eta = EtaEstimator(self._status.iterations, iteration)
        self._write(state="running", iteration=iteration)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Records that an iteration is done."""
        self._eta.update(step)
        rate = metrics.get("time/tokens_per_second", self._status.tokens_per_second)
        self._write(iteration=step, tokens_per_second=rate)

    def left(self, why: str) -> None:
        """Records that the run ends before its last iteration, for the reason `why`, and can be resumed."""
        with self._lock:
            self._status = replace(self._status, state="left", message=why)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # Before the last write, or the thread could write an older state after it.
        self._ended.set()
        if self._writes:
            self._thread.join()
        self._phase = lambda: ""  # the timer stays in its last phase
        if error is not None:
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._write(state="failed", message=reason)
        else:
            self._write(state="left" if self._status.state == "left" else "finished")

    @property
    def seconds_without_progress(self) -> float:
        """Seconds since this rank has made progress, up to `POLL_SECONDS` too few."""
        return time.monotonic() - self._progress_at

    def _poll(self) -> None:
        """Polls phase, checkpoint and progress every POLL_SECONDS, and writes the file; ended by `__exit__`."""
        progress = -1
        seen: tuple[str, int | None] = ("", None)
        written = time.monotonic()
        while not self._ended.wait(POLL_SECONDS):
            if progress != (progress := self._progress()):
                self._progress_at = time.monotonic()
            now = (self._phase(), self._checkpoint())
            if now != seen or time.monotonic() - written >= HEARTBEAT_SECONDS:
                self._write()
                seen, written = now, time.monotonic()

    def current(self) -> Status:
        """Returns the status as it is now; from any thread of rank 0."""
        status, left = self._status, self._eta.seconds_left
        eta = left if status.state == "running" else None
        return replace(status, phase=self._phase(), updated=time.time(), eta_seconds=eta, checkpoint=self._checkpoint())

    def _write(self, **changes: Any) -> None:
        with self._lock:  # all three threads write
            self._status = replace(self._status, **changes)
            if self._writes:
                with suppress(OSError), replacing(self._path) as file:
                    file.write_text(json.dumps(asdict(self.current()), indent=2) + "\n", encoding="utf-8")


def read_status(folder: Path) -> Status:
    """Reads the status of a run; UserError where there is none."""
    file = folder / STATUS
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Status(**{field.name: content[field.name] for field in fields(Status)})
    except FileNotFoundError:
        raise UserError(f"{folder}: {STATUS} is missing. Give the job.output of a run.") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{file}: not the status of a run ({type(error).__name__}: {error}). Give the job.output of another run."
        ) from None


def format_status(status: Status, metrics: dict[str, Any], now: float) -> str:
    """Formats a status in a few lines; `now` is in Unix seconds, as the times of the status."""
    silent = now - status.updated
    phase = f", {status.phase}" if status.phase else ""
    # A process that was killed cannot write its state; the last one says "running".
    state: str = status.state
    if status.state in ("starting", "running") and silent > SILENCE_SECONDS:
        state, phase = f"no update for {format_seconds(silent)}", ""
    message = f": {status.message}" if status.message else ""
    lines = [
        f"{status.recipe}: {state}{message}",
        f"iteration {status.iteration} of {status.iterations}{phase}, on {status.ranks} ranks",
    ]
    speed = [f"{status.tokens_per_second:.0f} tokens/s"] if status.tokens_per_second is not None else []
    if status.eta_seconds is not None:
        speed.append(f"{format_seconds(status.eta_seconds)} left")
    lines += [", ".join(speed)] if speed else []
    shown = [f"{name} {value:.4g}" for name, value in metrics.items() if _is_headline(name) and value is not None]
    lines += [", ".join(shown)] if shown else []
    checkpoint = "no checkpoint" if status.checkpoint is None else f"checkpoint of iteration {status.checkpoint}"
    lines.append(f"{checkpoint}, updated {format_seconds(max(0.0, silent))} ago ({status.host}, pid {status.pid})")
    return "\n".join(lines)


def show_status(folder: Path) -> int:
    """Prints the status of a run; returns 0 where it has finished, otherwise NOT_FINISHED."""
    status = read_status(folder)
    # Not only of the last line: some metrics, such as an evaluation's, are not in every one.
    metrics = {name: value for line in read_lines(folder / METRICS) for name, value in line.items()}
    print(format_status(status, metrics, time.time()))
    return 0 if status.state == "finished" else NOT_FINISHED


def _is_headline(name: str) -> bool:
    return name in ("reward/mean", "eval/reward", "response/length") or name.endswith("/loss")
