"""Graceful stop by SIGTERM, SIGUSR1 or an alarm: the job ends its iteration with a checkpoint, and all ranks exit.

running -- SIGTERM, SIGUSR1, alarm --> stop requested -- end of the iteration --> all ranks agree, checkpoint, exit
                                            |
                                            +-- SIGTERM again, after REPEATED_SIGTERM_SECONDS --> the process ends

main thread        records the signal in its handler; between iterations `any_rank_stop_requested`, a collective
thread "signals"   owns the reading end of a socket pair, into whose writing end Python puts each signal's number
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from verl_mg.distributed.launcher import STOP_CODE, Launcher

HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # signals that request a stop
REPEATED_SIGTERM_SECONDS = 2.0
"""Seconds after the first SIGTERM from which on another one ends the process immediately.

Schedulers may signal ranks as well as their launcher, so two SIGTERMs in quick succession are one request.
"""
EXIT_ALARM = 4  # exit code of a run that an alarm has stopped, after a checkpoint; schedulers should not start it again
SIGNAL_CODES = 128
"""Difference between the exit code of a process that a signal has ended, as shells know it, and the signal."""


class Signals:
    """Stop requests that this process received by signals, or made itself."""

    def __init__(self) -> None:
        self._code = 0
        self.exit_code = 0  # exit code of this process after a stop that all ranks agreed on
        self._previous_handlers: dict[signal.Signals, Any] = {}

    @property
    def stop_requested(self) -> bool:
        """True once this rank received a stop request; other ranks may not have."""
        return self._code > 0

    def request_stop(self, exit_code: int) -> None:
        """Requests a stop, as a signal does; exit codes of signals, which are larger, have precedence."""
        self._code = max(self._code, exit_code)

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Context manager: records signals instead of dying; a second SIGTERM ends the process immediately."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)  # as `set_wakeup_fd` requires
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
        # Ranks get signals at different moments, and a checkpoint needs all of them in the same iteration.
        reduced = torch.tensor(self._code)
        dist.all_reduce(reduced, dist.ReduceOp.MAX)
        code = int(reduced)
        if code and (launcher := Launcher.of_this_rank()):
            launcher.report(STOP_CODE, code)
        elif code < SIGNAL_CODES:  # without our launcher, ranks that a signal has stopped end regularly
            self.exit_code = code
        return bool(code)

    def _restore_handlers(self, wakeup: int = -1) -> None:
        if self._previous_handlers:
            signal.set_wakeup_fd(wakeup)
        while self._previous_handlers:
            signal.signal(*self._previous_handlers.popitem())

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._code = SIGNAL_CODES + number


def _exit_at_second_sigterm(reader: socket.socket) -> None:
    """Consumes the signals' numbers from the socket; ended by its other end being closed, or with the process."""
    # A thread, because Python's handlers wait for the main thread to return from a collective.
    first: float | None = None
    while numbers := reader.recv(1):
        if numbers[0] != signal.SIGTERM:
            continue
        if first is None:
            first = time.monotonic()
        elif time.monotonic() - first > REPEATED_SIGTERM_SECONDS:
            os._exit(SIGNAL_CODES + signal.SIGTERM)
