"""The end of all ranks of a job at once, as a loss of power is."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence


def kill_ranks(pids: Sequence[int]) -> None:
    """Kills all ranks, of which this process is one; none sees before it ends that another one has.

    Args:
        pids: their processes.
    """
    others = [pid for pid in pids if pid != os.getpid()]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in others:
            os.kill(pid, number)
    os.kill(os.getpid(), signal.SIGKILL)
