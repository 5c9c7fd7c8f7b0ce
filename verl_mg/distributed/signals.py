"""Graceful stop by SIGTERM or SIGUSR1: the job ends its iteration, writes a checkpoint, and all ranks exit."""

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

HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that request a stop."""
REPEATED_SIGTERM_SECONDS = 2.0
"""Seconds after the first SIGTERM from which on another one ends the process at once.

Schedulers may signal ranks as well as their launcher, so two SIGTERMs in quick succession are one request.
"""
STOP_SIGNAL_FILE = "VERL_MG_STOP_SIGNAL_FILE"
"""Environment variable: path of the file in which a stopping job reports the signal's number to its launcher."""


class Signals:
    """Stop requests that this process received by signals."""

    def __init__(self) -> None:
        self._received = 0
        self._previous_handlers: dict[signal.Signals, Any] = {}

    @property
    def stop_requested(self) -> bool:
        """True once this rank received a stop request; other ranks may not have."""
        return self._received > 0

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Context manager: records signals instead of dying; a second SIGTERM ends the process at once."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._previous_handlers = {number: signal.signal(number, self._record) for number in HANDLED_SIGNALS}
        # A worker process that is terminated must end: the request is not meant for the job.
        os.register_at_fork(after_in_child=self._restore_handlers)
        for number in HANDLED_SIGNALS:
            signal.siginterrupt(number, False)  # system calls of libraries are not interrupted
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        listener = threading.Thread(target=_exit_at_second_sigterm, args=(reader,), name="signals", daemon=True)
        listener.start()
        try:
            yield
        finally:
            self._restore_handlers(wakeup)
            writer.close()
            listener.join()
            reader.close()

    def any_rank_stop_requested(self) -> bool:
        """Returns whether any rank received a stop request; a collective of all ranks of the job."""
        received = torch.tensor(self._received)
        dist.all_reduce(received, dist.ReduceOp.MAX)
        if received and STOP_SIGNAL_FILE in os.environ:
            Path(os.environ[STOP_SIGNAL_FILE]).write_text(str(int(received)), encoding="utf-8")
        return bool(received)

    def _restore_handlers(self, wakeup: int = -1) -> None:
        if self._previous_handlers:
            signal.set_wakeup_fd(wakeup)
        while self._previous_handlers:
            signal.signal(*self._previous_handlers.popitem())

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._received = number


def _exit_at_second_sigterm(reader: socket.socket) -> None:
    # A thread, because Python's handlers wait for the main thread to return from a collective.
    first: float | None = None
    while numbers := reader.recv(1):
        if numbers[0] != signal.SIGTERM:
            continue
        if first is None:
            first = time.monotonic()
        elif time.monotonic() - first > REPEATED_SIGTERM_SECONDS:
            os._exit(128 + signal.SIGTERM)
