"""SIGTERM and SIGUSR1 ask a job to leave: it ends the iteration, saves what it goes on from, and all ranks end."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

HEEDED = (signal.SIGTERM, signal.SIGUSR1)
REPEATED_AFTER = 2.0
"""Seconds from a SIGTERM to the next one that is meant: schedulers may signal ranks as well as their launcher."""
LEFT = "VERL_MG_LEFT"
"""In the environment: the file in which a job that was asked to leave tells its launcher the signal's number."""


class Signals:
    """What this process was asked by signals."""

    def __init__(self) -> None:
        self._asked = 0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether this rank has been asked to leave; others may not have."""
        return self._asked > 0

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Inside, a signal is only noted, but a second SIGTERM ends the process at once, whatever it is doing."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._before = {number: signal.signal(number, self._note) for number in HEEDED}
        os.register_at_fork(after_in_child=self._let_go)  # a worker that is terminated means itself
        for number in HEEDED:
            signal.siginterrupt(number, False)  # libraries need not know
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        listener = threading.Thread(target=_end_at_the_second, args=(reader,), name="signals", daemon=True)
        listener.start()
        try:
            yield
        finally:
            self._let_go(wakeup)
            writer.close()
            listener.join()
            reader.close()

    def asked_to_leave(self) -> bool:
        """Whether any rank has been asked; all ranks call it together and hear the same."""
        asked = torch.tensor(self._asked)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        if asked and LEFT in os.environ:
            Path(os.environ[LEFT]).write_text(str(int(asked)), encoding="utf-8")
        return bool(asked)

    def _let_go(self, wakeup: int = -1) -> None:
        if self._before:
            signal.set_wakeup_fd(wakeup)
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = number


def _end_at_the_second(reader: socket.socket) -> None:
    # A thread, because Python's handlers wait for the main thread to come back from a collective.
    first: float | None = None
    while numbers := reader.recv(1):
        if numbers[0] != signal.SIGTERM:
            continue
        if first is None:
            first = time.monotonic()
        elif time.monotonic() - first > REPEATED_AFTER:
            os._exit(128 + signal.SIGTERM)
