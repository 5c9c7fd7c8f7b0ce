"""Watchdog over the ranks of a job: a rank that dies or hangs is named with its stack, and all ranks exit.

    main thread            works; calls `end` or `abort` for an error
    heartbeat thread       each interval: writes heartbeat and stack, reads "ends" and the heartbeats that it watches
                           (rank 0: of all ranks, other ranks: of rank 0); owns the watchdog's connection to the store
    store guard thread     each interval: has the heartbeat thread made progress? If not for the timeout, exits:
                           this host is disconnected, or the store's host is down

    first rank to add to "ends", for a silent rank, a stall or an error:
                           prints why, sets "verdict", dumps, waits for "acks", exits with the exit code
    all others, at their next heartbeat:
                           "ends" is above 0: read "verdict", dump, add to "acks", exit with the exit code

A heartbeat is two requests to the store, and the interval grows with the number of ranks, so that all ranks together
send at most MAX_REQUESTS_PER_SECOND. There are no leaders that collect the heartbeats of a node: a rank would depend on
a process that can be lost by itself. Stacks are in separate keys, which are read only when a rank is lost.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from verl_mg.config import JobConfig
from verl_mg.distributed.stall_dump import (
    dump_lost_rank,
    dump_rank,
    innermost_user_frame,
    main_stack,
    main_waits,
    upload_dumps,
)
from verl_mg.stores.url import ObjectUrl

EXIT_RANK_LOST = 3  # exit code of every rank when one is lost or hangs
HEARTBEAT_SECONDS = 1.0  # shortest interval between heartbeats, in seconds
REQUESTS_PER_HEARTBEAT = 2
"""Requests to the store of one heartbeat: writing the state of the rank, reading that of others."""
MAX_REQUESTS_PER_SECOND = 500
"""Limit of the heartbeats' requests of all ranks together; more ranks have a longer interval."""
MISSED_HEARTBEATS = 3  # a rank counts as lost after at least this many intervals, whatever the timeout
SUSPICIOUS_TIMEOUT_SECONDS = 10.0
"""Heartbeat timeout in seconds where a connection broke or a stop is requested: a rank has probably died."""
ACK_SECONDS = 3.0
"""Seconds for which the rank that ends a job waits for acknowledgements of the others, or two longer intervals."""
STORE_TIMEOUT = timedelta(seconds=30)  # timeout of one request to the store
HEARTBEAT_TIMEOUT_SECONDS = 60.0  # heartbeat timeout in seconds until the configuration is known
STALL_TIMEOUT_SECONDS = 1800.0
"""Stall timeout in seconds until the configuration is known: for the ranks to connect to each other."""
STALLS = "stalls"  # folder inside a run's folder, with one folder for each time that ranks were lost or stalled
PEER_FAILURE_WORDS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Words in the message of an exception that was raised because another rank has exited."""


@dataclass
class Heartbeat:
    """State of a rank as it reports it in the store."""

    count: int = 0  # number of heartbeats so far
    progress: int = 0  # counter that grows while the rank makes progress
    host: str = ""
    pid: int = 0
    suspicious: bool = False  # whether a connection to another rank broke or a stop is requested
    waits: bool = False  # whether the main thread waits for other ranks
    exited: bool = False  # whether the rank has ended regularly


@dataclass
class _LastHeartbeat:
    heartbeat: Heartbeat
    received_at: float  # time of `time.monotonic` at which its count last changed


def heartbeat_seconds(size: int) -> float:
    """Returns the interval between heartbeats in a job of `size` ranks, in seconds."""
    return max(HEARTBEAT_SECONDS, size * REQUESTS_PER_HEARTBEAT / MAX_REQUESTS_PER_SECOND)


class RankWatchdog:
    """Watchdog of one rank in a job of several, running from its construction until `stop`."""

    def __init__(self, rank: int, size: int, store: Store, stop_requested: Callable[[], bool] = lambda: False) -> None:
        # A connection of the threads: the main thread's is blocked while that thread waits for a key.
        clone = store.clone()  # type: ignore[attr-defined]
        clone.set_timeout(STORE_TIMEOUT)
        self._rank, self._size, self._stop_requested = rank, size, stop_requested
        self._interval = heartbeat_seconds(size)
        self._address = _address(clone)
        self._store = PrefixStore("watch", clone)
        self._store.add("ends", 0)  # a key that is read exists
        self._watched_ranks = [r for r in range(size) if r != rank] if rank == 0 else [0]
        self._last_heartbeats: dict[int, _LastHeartbeat] = {}
        self._num_heartbeats = self._unanswered_checks = 0
        self._peer_failed = False
        self._last_progress_at = time.monotonic()
        self._heartbeat_timeout, self._stall_timeout = HEARTBEAT_TIMEOUT_SECONDS, STALL_TIMEOUT_SECONDS
        self._dump_folder: Path | None = None
        self._dump_url: ObjectUrl | None = None  # of a run on an object store
        self._progress: Callable[[], int] = lambda: 0
        self._last_progress: list[int] = []
        self._stopping = threading.Event()
        self._exiting = threading.Lock()  # never released: one thread ends the process, the other waits for that
        targets = (self._heartbeat_loop, self._store_guard_loop)
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    def configure(self, job: JobConfig) -> None:
        """Sets timeouts and folder of `stall_dump`, and restarts the count of the stall timeout, never reached at 0."""
        self._heartbeat_timeout, self._stall_timeout = job.heartbeat_timeout_s, job.stall_timeout_s
        self._dump_folder = job.folder / STALLS if job.dump_on_stall else None
        self._dump_url = job.output / STALLS if isinstance(job.output, ObjectUrl) else None
        self._last_progress_at = time.monotonic()

    def watch_progress(self, progress: Callable[[], int]) -> None:
        """Sets the function whose result changes as long as this rank makes progress."""
        self._progress = progress

    @property
    def seconds_without_progress(self) -> float:
        """Seconds since any rank has made progress, as rank 0 knows it."""
        return time.monotonic() - self._last_progress_at

    def heartbeat_ages(self) -> dict[int, float]:
        """Returns the seconds since the last heartbeat of each rank that this one watches; from any thread."""
        now = time.monotonic()
        return {rank: now - last.received_at for rank, last in self._last_heartbeats.copy().items()}

    def stop(self) -> None:
        """Ends the watchdog regularly: other ranks do not expect heartbeats of this rank any more."""
        # The threads end first: a heartbeat of theirs must not follow the one with `exited`.
        self._stopping.set()
        for thread in self._threads:
            thread.join(ACK_SECONDS)
        with suppress(RuntimeError):  # the rank that hosts the store may have exited already
            self._publish(exited=True)

    def abort(self, error: Exception) -> NoReturn:
        """Ends the job for an error of this rank, with its traceback."""
        # An error that only follows from the loss of another rank is not printed: this rank waits for the verdict,
        # and prints it after all if none arrives.
        if is_peer_failure(error):
            self._peer_failed = True
            deadline = time.monotonic() + self._timeout(suspicious=True) + 5 * self._interval
            while time.monotonic() < deadline or self._unanswered_checks:
                time.sleep(HEARTBEAT_SECONDS)  # a thread ends this process when it receives the verdict
        self.end(1, "".join(traceback.format_exception(error)).rstrip())

    def end(self, exit_code: int, message: str, lost: Sequence[int] = ()) -> NoReturn:
        """Ends all ranks; only the message of the first rank to call it is printed."""
        self._exiting.acquire()
        first = True  # without a store no other rank can print it
        with suppress(RuntimeError):
            first = self._store.add("ends", 1) == 1  # an atomic counter: exactly one rank gets 1
        # Only of a loss or a stall: an error has a traceback that says where.
        dumps = self._dump_folder if exit_code == EXIT_RANK_LOST else None
        folder = str(dumps / time.strftime("%Y%m%d-%H%M%S")) if dumps else ""
        if first:
            place = self._dump_url / Path(folder).name if self._dump_url else folder
            where = f"\nThe stacks and latest collectives of all ranks are in {place}." if folder else ""
            print(message + where, file=sys.stderr, flush=True)
        with suppress(RuntimeError):
            if first:
                self._store.set("verdict", json.dumps([exit_code, folder]))
                self._dump(folder, lost)
                self._wait_for_acks()
                self._upload(folder, lost)
            else:
                exit_code = self._read_verdict()
        _exit(exit_code)

    # -- thread that sends and checks heartbeats

    def _heartbeat_loop(self) -> None:
        """Consumes heartbeats of the store at each interval; ended by `stop`, a loss or a verdict."""
        while True:
            with suppress(RuntimeError):  # the store did not answer; the other thread counts for how long
                self._publish()
                self._num_heartbeats += 1
                self._read_heartbeats()
                self._check_ranks()
            if self._stopping.wait(self._interval):
                return

    def _publish(self, exited: bool = False) -> None:
        heartbeat = Heartbeat(
            count=self._num_heartbeats,
            progress=self._progress(),
            host=socket.gethostname(),
            pid=os.getpid(),
            suspicious=self._peer_failed or self._stop_requested(),
            waits=main_waits(),
            exited=exited,
        )
        keys = [f"heartbeat/{self._rank}", f"stack/{self._rank}"]
        values = [json.dumps(asdict(heartbeat)), json.dumps(main_stack())]
        self._store.multi_set(keys, values)  # type: ignore[attr-defined]  # not in torch's stubs

    def _read_heartbeats(self) -> None:
        # One request for all: the counter of ends travels with the heartbeats.
        keys = ["ends", *(f"heartbeat/{rank}" for rank in self._watched_ranks)]
        watched = self._watched_ranks
        if not self._last_heartbeats and not self._store.check(keys):
            keys, watched = keys[:1], []  # some ranks have not started their watchdog yet
        ends, *texts = self._store.multi_get(keys)
        if int(ends):
            self._exiting.acquire()
            _exit(self._read_verdict())
        # By this rank's clock, at which a count changes: clocks of hosts differ.
        now = time.monotonic()
        for rank, text in zip(watched, texts, strict=True):
            heartbeat, last = Heartbeat(**json.loads(text)), self._last_heartbeats.get(rank)
            if last is None or heartbeat.count != last.heartbeat.count or heartbeat.exited:
                self._last_heartbeats[rank] = _LastHeartbeat(heartbeat, now)

    def _check_ranks(self) -> None:
        now = time.monotonic()
        others = self._last_heartbeats
        suspicious = self._peer_failed or self._stop_requested()
        suspicious = suspicious or any(last.heartbeat.suspicious for last in others.values())
        timeout = self._timeout(suspicious)
        silent = {rank: now - last.received_at for rank, last in others.items() if not last.heartbeat.exited}
        if any(seconds > timeout for seconds in silent.values()):
            # The ranks of a lost host become silent together, but not all at the same moment.
            lost = sorted((rank for rank in silent if silent[rank] > timeout / 2), key=lambda rank: -silent[rank])
            self.end(EXIT_RANK_LOST, self._loss_message(lost, silent[lost[0]]), lost)
        progress = [self._progress(), *(last.heartbeat.progress for last in others.values())]
        if progress != self._last_progress:
            self._last_progress, self._last_progress_at = progress, now
        if self._rank == 0 and self._stall_timeout and now - self._last_progress_at > self._stall_timeout:
            self.end(EXIT_RANK_LOST, self._stall_message(now - self._last_progress_at))

    def _timeout(self, suspicious: bool) -> float:
        """Returns the seconds without a heartbeat after which a rank is lost."""
        seconds = min(self._heartbeat_timeout, SUSPICIOUS_TIMEOUT_SECONDS) if suspicious else self._heartbeat_timeout
        return max(seconds, MISSED_HEARTBEATS * self._interval)

    # -- thread that detects when the other one is blocked

    def _store_guard_loop(self) -> None:
        """Consumes the heartbeat thread's count at each interval; ended by `stop` or a silent store."""
        seen = -1
        # Counted in wake-ups, not in time: a suspended host does not count as a store that does not answer.
        while not self._stopping.wait(self._interval):
            unanswered = self._unanswered_checks + 1 if seen == self._num_heartbeats else 0
            seen, self._unanswered_checks = self._num_heartbeats, unanswered
            seconds = self._unanswered_checks * self._interval
            if seconds > self._timeout(suspicious=False):
                if os.environ.get("LOCAL_RANK", "0") == "0":  # once for each host, without a store to agree by
                    print(
                        f"error: rank {self._rank}: the job's store at {self._address} has not answered for "
                        f"{seconds:.0f} s. This host is disconnected, or the store's host is down.",
                        file=sys.stderr,
                    )
                _exit(EXIT_RANK_LOST)

    # -- exit of all ranks

    def _read_verdict(self) -> int:
        exit_code, folder = json.loads(self._store.get("verdict"))
        self._dump(folder)
        self._store.add("acks", 1)
        if folder:  # the end of this rank would change the stacks of those that have not written theirs
            self._wait_for_acks()
            self._upload(folder)
        return int(exit_code)

    def _dump(self, folder: str, lost: Sequence[int] = ()) -> None:
        """Writes the files of this rank and of lost ones; none without a folder."""
        if not folder:
            return
        dump_rank(Path(folder), self._rank)
        for rank, stack in zip(lost, self._stacks(lost), strict=True) if lost else ():
            last = self._last_heartbeats[rank].heartbeat
            dump_lost_rank(Path(folder), rank, f"host {last.host}, pid {last.pid}", stack)

    def _upload(self, folder: str, lost: Sequence[int] = ()) -> None:
        # By each rank, after it has acknowledged: a rank that is lost uploads nothing, and none waits for a store.
        if folder and self._dump_url:
            upload_dumps(Path(folder), self._dump_url / Path(folder).name, [self._rank, *lost])

    def _wait_for_acks(self) -> None:
        # Where this rank hosts the store, its end takes the verdict away from ranks that have not read it.
        deadline = time.monotonic() + max(ACK_SECONDS, 2 * self._interval)
        with suppress(RuntimeError):  # the store has ended, whose rank has got all
            while self._store.add("acks", 0) < self._size - 1 and time.monotonic() < deadline:
                time.sleep(0.05)

    # -- messages

    def _loss_message(self, lost: list[int], seconds: float) -> str:
        first, *more = lost
        last, stack = self._last_heartbeats[first].heartbeat, self._stacks([first])[0]
        others = f", nor from {_format_ranks(more)}" if more else ""
        return (
            f"error: rank {first} (host {last.host}, pid {last.pid}): no heartbeat for {seconds:.0f} s{others}. "
            f"It was last at {innermost_user_frame(stack)}.\n{_indented(stack)}"
        )

    def _stacks(self, ranks: Sequence[int]) -> list[list[str]]:
        """Returns the stacks that ranks have reported last; empty ones if the store does not answer."""
        with suppress(RuntimeError):
            return [json.loads(text) for text in self._store.multi_get([f"stack/{rank}" for rank in ranks])]
        return [[] for _ in ranks]

    def _stall_message(self, seconds: float) -> str:
        heartbeats = {rank: last.heartbeat for rank, last in self._last_heartbeats.items()}
        heartbeats[0] = Heartbeat(host=socket.gethostname(), pid=os.getpid(), waits=main_waits())
        ranks = sorted(heartbeats)
        stacks = dict(zip(ranks, self._stacks(ranks), strict=True))
        late = sorted(rank for rank, heartbeat in heartbeats.items() if not heartbeat.waits)
        message = f"error: no progress on any rank for {seconds:.0f} s. "
        if late and len(late) < self._size:
            first = heartbeats[late[0]]
            single = len(late) == 1
            message += (
                f"{_format_ranks(late).capitalize()} ({'' if single else 'the first: '}host {first.host}, "
                f"pid {first.pid}) {'is' if single else 'are'} not in a collective while the others are; "
                f"{'it' if single else 'the first'} is at {innermost_user_frame(stacks[late[0]])}."
            )
        else:
            message += "All ranks are in a collective." if not late else "No rank is in a collective."
        ranks_by_stack: dict[str, list[int]] = {}
        for rank in ranks:
            ranks_by_stack.setdefault(_indented(stacks[rank]), []).append(rank)
        reports = (f"{_format_ranks(ranks)}:\n{stack}" for stack, ranks in ranks_by_stack.items())
        return "\n".join([message, *reports])


def is_peer_failure(error: BaseException | None) -> bool:
    """Returns whether an exception was raised because another rank has exited."""
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError | OSError) and any(word in str(error) for word in PEER_FAILURE_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `sys.exit`: threads of the process groups may wait for ranks that have exited, and would keep the process.
    os._exit(code)


def _address(store: Any) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}"


def _format_ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _indented(stack: Iterable[str]) -> str:
    return "\n".join(f"    {line}" for line in stack)
