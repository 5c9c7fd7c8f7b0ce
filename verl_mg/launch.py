"""torchrun, ending with the ranks' own exit code and without its traceback.

    python -m verl_mg.launch --nproc-per-node 2 -m verl_mg train ...

takes torchrun's arguments. A rank has already said what was wrong; torchrun would add a report of its own. SIGTERM and
SIGUSR1 are handed on to the ranks, which save and leave; the exit code is then 128 + signal, so that a scheduler
knows that the job is to be started again.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed import DistError, run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from verl_mg.distributed.signals import HANDLED_SIGNALS, STOP_SIGNAL_FILE
from verl_mg.distributed.watchdog import EXIT_RANK_LOST

UNSEEN_SECONDS = 10
"""In which torchrun should have seen that the ranks have ended; it looks many times a second."""


def main(arguments: list[str] | None = None) -> None:
    """Run torchrun with the given arguments (those of the process otherwise)."""
    # What torchrun sets itself, with a warning, where a rank is not alone; a rank then chooses by its cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Of those that torchrun would answer by ending the ranks, without the ones that are handed on.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGINT,SIGHUP,SIGQUIT")
    for number in HANDLED_SIGNALS:
        signal.signal(number, _hand_on)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="verl_mg-") as folder:
        threading.Thread(target=_follow_the_ranks, args=(folder,), daemon=True).start()
        left = Path(folder) / "left"
        os.environ[STOP_SIGNAL_FILE] = str(left)
        try:
            run.main(arguments)
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            # A rank ended by a signal has a negative code; shells know it as 128 + signal.
            sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
        except SignalException as error:
            sys.exit(128 + error.sigval)
        except (RendezvousError, DistError) as error:
            reason = error.__cause__ or error
            print(f"error: the launchers of the job's hosts do not reach each other: {reason}", file=sys.stderr)
            sys.exit(EXIT_RANK_LOST)
        if left.exists():
            sys.exit(128 + int(left.read_text(encoding="utf-8")))


def _hand_on(number: int, frame: FrameType | None) -> None:
    ranks = psutil.Process().children()
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)
    if not ranks:  # none has started yet, or other hosts are waited for
        sys.exit(128 + number)


def _follow_the_ranks(folder: str) -> None:
    """End where all ranks have ended and torchrun does not see it, as when it asks a host that is cut off."""
    unseen = 0
    while unseen < UNSEEN_SECONDS:
        time.sleep(1)
        ranks = psutil.Process().children()
        unseen = unseen + 1 if ranks and all(_is_over(rank) for rank in ranks) else 0
    ends = [os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for rank in ranks]
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(max(_code(end) for end in ends if end))


def _is_over(rank: psutil.Process) -> bool:
    try:
        return rank.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # torchrun has seen it
        return False


def _code(end: os.waitid_result) -> int:
    return end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status


if __name__ == "__main__":
    main()
