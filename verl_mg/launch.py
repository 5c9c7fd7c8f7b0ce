"""torchrun with the exit code of the ranks and without its traceback.

    python -m verl_mg.launch --nproc-per-node 2 -m verl_mg train ...

takes torchrun's arguments. A rank has already reported what was wrong; torchrun would add a second report. SIGTERM and
SIGUSR1 are forwarded to the ranks, which save a checkpoint and exit; the exit code is then 128 + signal, so that a
scheduler starts the job again.
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

from verl_mg.distributed.rendezvous import raise_open_files_limit
from verl_mg.distributed.signals import HANDLED_SIGNALS, STOP_CODE_FILE
from verl_mg.distributed.watchdog import EXIT_RANK_LOST

UNSEEN_SECONDS = 10
"""Seconds in which torchrun, which polls many times a second, should notice that the ranks have ended."""


def main(arguments: list[str] | None = None) -> None:
    """Runs torchrun with the given arguments, or those of the process."""
    # torchrun sets it with a warning if there are several ranks; a rank then chooses by its cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Signals upon which torchrun ends the ranks, without those that are forwarded.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGINT,SIGHUP,SIGQUIT")
    for number in HANDLED_SIGNALS:
        signal.signal(number, _forward_signal)
    raise_open_files_limit()  # the job's store is here, with several connections of each rank
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="verl_mg-") as folder:
        threading.Thread(target=_follow_the_ranks, args=(folder,), daemon=True).start()
        left = Path(folder) / "left"
        os.environ[STOP_CODE_FILE] = str(left)
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
            sys.exit(int(left.read_text(encoding="utf-8")))


def _forward_signal(number: int, frame: FrameType | None) -> None:
    ranks = psutil.Process().children()
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)
    if not ranks:  # none has started yet, or torchrun waits for other hosts
        sys.exit(128 + number)


def _follow_the_ranks(folder: str) -> None:
    """Exits if all ranks have ended and torchrun does not notice, as when it queries a host that is cut off."""
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
