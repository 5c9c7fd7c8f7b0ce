"""torchrun with the exit code of the ranks and without its traceback.

    python -m verl_mg.launch --nproc-per-node 2 -m verl_mg train ...

takes torchrun's arguments. A rank has already reported what was wrong; torchrun would add a second report. SIGTERM and
SIGUSR1 are forwarded to the ranks, which save a checkpoint and exit; the exit code is then 128 + signal, so that a
scheduler starts the job again.

With `--max-restarts N` ranks are started by `RankAgent`, which keeps engines over restarts. With `--spares N` so many
nodes more than `--nnodes` are started, which wait until a node is lost.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed import DistError, run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from verl_mg.distributed.launcher import STOP_CODE, VARIABLE, Launcher
from verl_mg.distributed.rendezvous import raise_open_files_limit
from verl_mg.distributed.signals import HANDLED_SIGNALS
from verl_mg.distributed.watchdog import EXIT_RANK_LOST
from verl_mg.launch.agent import create_agent, run_agent

UNSEEN_SECONDS = 10
"""Seconds in which torchrun, which polls the ranks many times a second, should notice that they have ended."""
RESTARTS_OF_CHANGING_NODES = 3  # restarts of a job with spare nodes, or a range of nodes, that does not say how many
MAX_ENGINES = 4096  # connections of engines that may wait to be accepted by a launcher, which accepts none


def main(arguments: list[str] | None = None) -> None:
    """Runs torchrun with the given arguments, or with the process's."""
    # torchrun sets it with a warning if there are several ranks; a rank then chooses by its cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Signals upon which torchrun ends the ranks, without those that are forwarded.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGINT,SIGHUP,SIGQUIT")
    raise_open_files_limit()  # the job's store is here, with several connections of each rank
    # They log tracebacks and signals of ranks, which have already said in one line what was wrong.
    for library in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="verl_mg-") as folder:
        launcher, parsed = Launcher(Path(folder)), _parsed(arguments)
        os.environ[VARIABLE] = folder
        try:
            if parsed.max_restarts and parsed.rdzv_backend == "c10d" and not parsed.no_python:
                _run_with_restarts(parsed, launcher)
            else:
                _forward_signals(lambda: psutil.Process().children())
                threading.Thread(target=_follow_the_ranks, args=(folder,), daemon=True).start()
                run.run(parsed)
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
        if code := launcher.number(STOP_CODE):
            sys.exit(code)


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Returns torchrun's arguments, with a local rendezvous where a job on one node names none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--spares", type=int, default=0)
    additional, of_torchrun = parser.parse_known_args(arguments)
    parsed = run.parse_args(of_torchrun)
    unnamed = run.get_args_parser().get_default("master_port")  # None, and a number in torch 2.11
    names_none = parsed.rdzv_backend == "static" and not parsed.rdzv_endpoint and parsed.master_port == unnamed
    # Restarts need the dynamic rendezvous, and the static one has the same port for all jobs of a machine.
    if parsed.standalone or (names_none and parsed.nnodes in ("1", "1:1")):
        parsed.rdzv_backend, parsed.rdzv_endpoint, parsed.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    # A spare node is of use only if ranks start again after a loss.
    least, most = run.parse_min_max_nnodes(parsed.nnodes)
    if additional.spares or least < most:
        parsed.max_restarts = parsed.max_restarts or RESTARTS_OF_CHANGING_NODES
    parsed.num_launchers = most + additional.spares
    return parsed


def _run_with_restarts(arguments: argparse.Namespace, launcher: Launcher) -> None:
    if arguments.num_launchers > 1:
        # torchrun's agents share the store of a node that may be lost, and keep its address when the nodes change.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # From here on ranks keep their engines: the key and the socket are there before the first rank starts.
    launcher.make_key()
    with socket.socket(socket.AF_UNIX) as listener:  # the connections of engines end with this process
        listener.bind(str(launcher.socket))
        listener.listen(MAX_ENGINES)
        agent = create_agent(arguments, launcher)

        def stopped_ranks() -> list[psutil.Process]:
            agent.stops = True
            return agent.ranks

        _forward_signals(stopped_ranks)
        run_agent(agent)


def _forward_signals(ranks_of_this_node: Callable[[], list[psutil.Process]]) -> None:
    """Forwards signals that request a stop to the ranks."""

    def forward(number: int, frame: FrameType | None) -> None:
        ranks = ranks_of_this_node()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        if not ranks:  # none has started yet, or torchrun waits for other hosts
            sys.exit(128 + number)

    for number in HANDLED_SIGNALS:
        signal.signal(number, forward)


def _follow_the_ranks(folder: str) -> None:
    """Exits if all ranks have ended and torchrun does not notice, as when it queries a host that is cut off."""
    # The loop of a thread: looks at the ranks each second, and ends with the process.
    unseen = 0
    while unseen < UNSEEN_SECONDS:
        time.sleep(1)
        ranks = psutil.Process().children()
        unseen = unseen + 1 if ranks and all(_is_over(rank) for rank in ranks) else 0
    # WNOWAIT: torchrun, which may continue meanwhile, still finds the ends.
    ends = [os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for rank in ranks]
    shutil.rmtree(folder, ignore_errors=True)
    # The main thread hangs in a request, so the process cannot end in the regular way.
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
