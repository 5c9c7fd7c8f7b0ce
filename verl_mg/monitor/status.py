"""RUN/status.json: how far a run is, for other programs to read while it goes on and after it was killed."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from verl_mg.errors import UserError
from verl_mg.jsonl import read_lines
from verl_mg.monitor.eta import EtaEstimator, format_seconds
from verl_mg.monitor.summary import METRICS

if TYPE_CHECKING:  # it brings torch, and the command has to answer at once
    from verl_mg.phase_timer import PhaseTimer

STATUS = "status.json"
State = Literal["starting", "running", "finished", "left", "failed"]

EVERY = 1.0
"""Seconds between two looks at the phase; a change is written down then."""
HEARTBEAT = 10.0
"""Seconds after which it is written down that nothing has changed."""
SILENCE = 120.0
"""Seconds after which a run that does not write is taken for dead."""
NOT_FINISHED = 3
"""Exit code of `verl-mg status`, for scripts that put a job back in the queue."""


@dataclass(frozen=True)
class Status:
    """What the file says. iteration: the last one done; times are unix seconds; checkpoint: after which iteration.

    eta_seconds: to the end of the last iteration. message: why it left or failed.
    """

    recipe: str
    state: State
    iteration: int
    iterations: int
    phase: str
    started: float
    updated: float
    host: str
    pid: int
    ranks: int
    tokens_per_second: float | None
    eta_seconds: float | None
    checkpoint: int | None
    message: str


class StatusFile:
    """Keeps the file up to date while it is entered, from a thread of its own.

    A run that ends with an exception has failed; one that ends otherwise has finished, unless it `left`. Where the disk
    is full the file stays as it was. On all ranks but 0 nothing is written.
    """

    def __init__(self, folder: Path, recipe: str, iterations: int, rank: int, ranks: int) -> None:
        self._path, self._recipe, self._iterations, self._ranks = folder / STATUS, recipe, iterations, ranks
        self._writes = rank == 0
        self._iteration = 0
        self._checkpoint: Callable[[], int | None] = lambda: None
        self._pace = EtaEstimator(iterations)
        self._phase: Callable[[], str] = lambda: ""
        self._state: State = "starting"
        self._message = ""
        self._tokens_per_second: float | None = None
        self._started = time.time()
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="status", daemon=True)

    def __enter__(self) -> StatusFile:
        self._write()
        if self._writes:
            self._thread.start()
        return self

    def running(
        self, timer: PhaseTimer, iteration: int = 0, checkpoint: Callable[[], int | None] = lambda: None
    ) -> None:
        """The iteration after `iteration` begins.

        clock: of the phases. checkpoint: says after which iteration the last one was written.
        """
        self._state, self._phase, self._checkpoint = "running", lambda: timer.phase, checkpoint
        self._iteration = iteration
        self._pace = EtaEstimator(self._iterations, iteration)
        self._write()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """An iteration is done."""
        self._iteration = step
        self._pace.reached(step)
        self._tokens_per_second = metrics.get("time/tokens_per_second", self._tokens_per_second)
        self._write()

    def left(self, why: str) -> None:
        """The run ends before its last iteration, and can go on from there."""
        self._state, self._message = "left", why

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()
        if self._writes:
            self._thread.join()
        if error is not None:
            self._state = "failed"
            self._message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        elif self._state != "left":
            self._state = "finished"
        self._phase = lambda: ""
        self._write()

    def _keep(self) -> None:
        seen: tuple[str, int | None] = ("", None)
        written = time.monotonic()
        while not self._over.wait(EVERY):
            now = (self._phase(), self._checkpoint())
            if now != seen or time.monotonic() - written >= HEARTBEAT:
                self._write()
                seen, written = now, time.monotonic()

    def _write(self) -> None:
        if not self._writes:
            return
        status = Status(
            self._recipe,
            self._state,
            self._iteration,
            self._iterations,
            self._phase(),
            self._started,
            time.time(),
            socket.gethostname(),
            os.getpid(),
            self._ranks,
            self._tokens_per_second,
            self._pace.left if self._state == "running" else None,
            self._checkpoint(),
            self._message,
        )
        partial = self._path.with_name(STATUS + ".new")
        with self._lock, suppress(OSError):
            partial.write_text(json.dumps(asdict(status), indent=2) + "\n", encoding="utf-8")
            os.replace(partial, self._path)


def read_status(folder: Path) -> Status:
    """UserError where there is none."""
    file = folder / STATUS
    try:
        format_status = json.loads(file.read_text(encoding="utf-8"))
        return Status(**{field.name: format_status[field.name] for field in fields(Status)})
    except FileNotFoundError:
        raise UserError(f"{folder}: no run is there (no {STATUS}); give the job.output of a run") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file}: no readable status of a run ({type(error).__name__}: {error})") from None


def format_status(status: Status, metrics: dict[str, Any], now: float) -> str:
    """A few lines for people. metrics: the last that were logged, {} if none were; now: unix seconds."""
    silent = now - status.updated
    phase = f", {status.phase}" if status.phase else ""
    state: str = status.state
    if status.state in ("starting", "running") and silent > SILENCE:
        state, phase = f"not heard of for {format_seconds(silent)}", ""
    message = f": {status.message}" if status.message else ""
    lines = [
        f"{status.recipe}: {state}{message}",
        f"iteration {status.iteration} of {status.iterations}{phase}, on {status.ranks} ranks",
    ]
    pace = [f"{status.tokens_per_second:.0f} tokens/s"] if status.tokens_per_second is not None else []
    if status.eta_seconds is not None:
        pace.append(f"{format_seconds(status.eta_seconds)} to go")
    lines += [", ".join(pace)] if pace else []
    shown = [f"{name} {value:.4g}" for name, value in metrics.items() if _is_headline(name) and value is not None]
    lines += [", ".join(shown)] if shown else []
    checkpoint = "no checkpoint" if status.checkpoint is None else f"checkpoint of iteration {status.checkpoint}"
    lines.append(f"{checkpoint}, heard of {format_seconds(max(0.0, silent))} ago ({status.host}, pid {status.pid})")
    return "\n".join(lines)


def show_status(folder: Path) -> int:
    """Print it; 0 for a run that has finished, else NOT_FINISHED."""
    status = read_status(folder)
    print(format_status(status, _last_metrics(folder / METRICS), time.time()))
    return 0 if status.state == "finished" else NOT_FINISHED


def _last_metrics(file: Path) -> dict[str, Any]:
    """The newest value of each."""
    return {name: value for line in read_lines(file) for name, value in line.items()}


def _is_headline(name: str) -> bool:
    return name in ("reward/mean", "eval/reward", "response/length") or name.endswith("/loss")
