"""Watching over the ranks of a job: one that dies or hangs is named with its stack, and the others end.

every rank, each second    its beat  ──▶  store        a thread with a connection of its own
rank 0                     beats of all others ──▶  a rank is lost, or no rank goes on
the others                 the beat of rank 0  ──▶  rank 0 is lost
whoever finds out first    says so, once; its verdict ──▶ store ──▶ all others end too
a second thread            the store is silent ──▶ this host is cut off, or the store's host is gone
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from verl_mg.distributed.stacks import main_stack, main_waits, place

EXIT_RANK_LOST = 3
"""With which every rank leaves when one is lost or hangs."""
HEARTBEAT_SECONDS = 1.0
SUSPICIOUS_AFTER = 10.0
"""Seconds of silence that are enough where a connection broke or ranks are told to end: something has happened."""
ACK_SECONDS = 3.0
"""For which the rank that ends a job waits for the others to hear of it."""
ANSWER = timedelta(seconds=30)
HEARTBEAT_TIMEOUT_SECONDS = 60.0
"""Until the configuration is known."""
PEERS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""In what is raised on a rank because another one has gone."""


@dataclass
class Heartbeat:
    """What a rank says of itself.

    suspects: something has happened to another rank; waits: for others; gone: it has left, as it should.
    """

    count: int = 0
    progress: int = 0
    host: str = ""
    pid: int = 0
    suspicious: bool = False
    waits: bool = False
    gone: bool = False
    stack: list[str] = field(default_factory=list)


@dataclass
class _Heard:
    beat: Heartbeat
    at: float


class RankWatchdog:
    """Of one rank among several, from when it knows the store until `stop`."""

    def __init__(self, rank: int, size: int, store: Store, asked: Callable[[], bool] = lambda: False) -> None:
        """Start to watch. store: the job's; asked: whether this rank was told to end, see `Signals`."""
        # The main thread's own connection is taken while it waits for something.
        clone = store.clone()  # type: ignore[attr-defined]
        clone.set_timeout(ANSWER)
        self._rank, self._size, self._asked = rank, size, asked
        self._address = _address(clone)
        self._store = PrefixStore("watch", clone)
        self._others = [r for r in range(size) if r != rank] if rank == 0 else [0]
        self._heard: dict[int, _Heard] = {}
        self._beats = self._silent = 0
        self._broken = False
        self._moved = time.monotonic()
        self._lost_after, self._stalled_after = HEARTBEAT_TIMEOUT_SECONDS, 0.0
        self._ticks: Callable[[], int] = lambda: 0
        self._ticks_seen: list[int] = []
        self._stopping = threading.Event()
        self._leaving = threading.Lock()  # for good: one thread ends the process, the other one waits for that
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._guard)]
        for thread in self._threads:
            thread.start()

    def limit(self, heartbeat_timeout_s: float, stall_timeout_s: float) -> None:
        """Seconds after which a silent rank is lost, and after which a job that does not go on is ended (0: never)."""
        self._lost_after, self._stalled_after = heartbeat_timeout_s, stall_timeout_s
        self._moved = time.monotonic()

    def watch_progress(self, progress: Callable[[], int]) -> None:
        """ticks: a number that grows as long as this rank goes on."""
        self._ticks = progress

    def stop(self) -> None:
        """The regular end: nobody waits for this rank any more."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(ACK_SECONDS)
        with suppress(RuntimeError):  # the rank that holds the store may have left already
            self._publish(gone=True)

    def fail(self, error: Exception) -> NoReturn:
        """End the job for an error of this rank, with its traceback, unless it is but the echo of another's end."""
        if is_peer_failure(error):
            self._broken = True
            deadline = time.monotonic() + min(self._lost_after, SUSPICIOUS_AFTER) + 5 * HEARTBEAT_SECONDS
            while time.monotonic() < deadline or self._silent:
                time.sleep(HEARTBEAT_SECONDS)  # a thread ends this process when it hears why
        self.end(1, "".join(traceback.format_exception(error)).rstrip())

    def end(self, code: int, text: str) -> NoReturn:
        """End all ranks with `code`; the first to come here says why, and the others say nothing."""
        self._leaving.acquire()
        first = True  # without a store nobody else could say it
        with suppress(RuntimeError):
            first = self._store.add("ends", 1) == 1
        if first:
            print(text, file=sys.stderr, flush=True)
        with suppress(RuntimeError):
            if first:
                self._store.set("verdict", str(code))
                self._bid_farewell()
            else:
                code = self._verdict()
        _leave(code)

    # -- the thread that beats and judges

    def _beat(self) -> None:
        while True:
            with suppress(RuntimeError):  # without an answer from the store; the guard counts how long
                self._publish()
                self._beats += 1
                self._listen()
                self._judge()
            if self._stopping.wait(HEARTBEAT_SECONDS):
                return

    def _publish(self, gone: bool = False) -> None:
        beat = Heartbeat(
            count=self._beats,
            progress=self._ticks(),
            host=socket.gethostname(),
            pid=os.getpid(),
            suspicious=self._broken or self._asked(),
            waits=main_waits(),
            gone=gone,
            stack=main_stack(),
        )
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))

    def _listen(self) -> None:
        if self._store.check(["verdict"]):
            self._leaving.acquire()
            _leave(self._verdict())
        keys = [f"beat/{rank}" for rank in self._others]
        if not self._heard and not self._store.check(keys):
            return  # somebody has yet to come
        now = time.monotonic()
        for rank, text in zip(self._others, self._store.multi_get(keys), strict=True):
            beat, heard = Heartbeat(**json.loads(text)), self._heard.get(rank)
            if heard is None or beat.count != heard.beat.count or beat.gone:
                self._heard[rank] = _Heard(beat, now)

    def _judge(self) -> None:
        now = time.monotonic()
        suspicious = self._broken or self._asked() or any(heard.beat.suspicious for heard in self._heard.values())
        limit = min(self._lost_after, SUSPICIOUS_AFTER) if suspicious else self._lost_after
        silent = {rank: now - heard.at for rank, heard in self._heard.items() if not heard.beat.gone}
        if any(seconds > limit for seconds in silent.values()):
            # With one rank of a host others fall silent, not all in the same moment.
            lost = sorted((rank for rank in silent if silent[rank] > limit / 2), key=lambda rank: -silent[rank])
            self.end(EXIT_RANK_LOST, self._loss(lost, silent[lost[0]]))
        progress = [self._ticks(), *(heard.beat.progress for heard in self._heard.values())]
        if progress != self._ticks_seen:
            self._ticks_seen, self._moved = progress, now
        if self._rank == 0 and self._stalled_after and now - self._moved > self._stalled_after:
            self.end(EXIT_RANK_LOST, self._stall(now - self._moved))

    # -- the thread that notices when the other one is stuck

    def _guard(self) -> None:
        seen = -1
        # Counted in wakings: a host that slept has not been silent.
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            seen, self._silent = self._beats, (self._silent + 1 if seen == self._beats else 0)
            if self._silent * HEARTBEAT_SECONDS > self._lost_after:
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    print(
                        f"error: rank {self._rank}: the job's store at {self._address} has not answered for "
                        f"{self._silent * HEARTBEAT_SECONDS:.0f} s: this host is cut off, or the store's host is gone",
                        file=sys.stderr,
                    )
                _leave(EXIT_RANK_LOST)

    # -- how it ends

    def _verdict(self) -> int:
        code = int(self._store.get("verdict"))
        self._store.add("followers", 1)
        return code

    def _bid_farewell(self) -> None:
        deadline = time.monotonic() + ACK_SECONDS
        while self._store.add("followers", 0) < self._size - 1 and time.monotonic() < deadline:
            time.sleep(0.05)

    # -- what is said

    def _loss(self, lost: list[int], seconds: float) -> str:
        first, *more = lost
        beat = self._heard[first].beat
        told = f"error: rank {first} (host {beat.host}, pid {beat.pid}) has not been heard of for {seconds:.0f} s"
        told += f", nor have {_listed(more)}" if more else ""
        return f"{told}; it was last at {place(beat.stack)}\n{_indented(beat.stack)}"

    def _stall(self, seconds: float) -> str:
        beats = {rank: heard.beat for rank, heard in self._heard.items()}
        beats[0] = Heartbeat(host=socket.gethostname(), pid=os.getpid(), waits=main_waits(), stack=main_stack())
        late = sorted(rank for rank, beat in beats.items() if not beat.waits)
        told = f"error: no rank has gone on for {seconds:.0f} s; "
        if late and len(late) < self._size:
            beat = beats[late[0]]
            told += f"the others wait for {_listed(late)} (host {beat.host}, pid {beat.pid}), at {place(beat.stack)}"
        else:
            told += "all of them wait" if not late else "none of them waits for others"
        standing: dict[str, list[int]] = {}
        for rank in sorted(beats):
            standing.setdefault(_indented(beats[rank].stack), []).append(rank)
        return "\n".join([told, *(f"{_listed(ranks)}:\n{stack}" for stack, ranks in standing.items())])


def is_peer_failure(error: BaseException | None) -> bool:
    """Whether it was raised because another rank has gone."""
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError | OSError) and any(word in str(error) for word in PEERS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the process groups may wait for ranks that have left.
    os._exit(code)


def _address(store: Any) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}"


def _listed(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _indented(stack: Iterable[str]) -> str:
    return "\n".join(f"    {line}" for line in stack)
