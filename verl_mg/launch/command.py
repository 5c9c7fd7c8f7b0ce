"""torchrun with the exit code of the ranks and without its traceback.

It takes torchrun's arguments. A rank has already reported what was wrong; torchrun would add a second report. SIGTERM
and SIGUSR1 are forwarded to the ranks, which save a checkpoint and exit; the exit code is then 128 + signal, so that a
scheduler starts the job again.

Ranks are started by `RankAgent`, which with `--max-restarts N` keeps engines over restarts. With `--spares N` so many
nodes more than `--nnodes` are started, which wait until a node is lost. Programs of other languages, `--no-python`, are
started by torchrun itself.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import psutil
from torch.distributed import DistError, run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from verl_mg.distributed.launcher import STOP_CODE, Launcher
from verl_mg.distributed.rendezvous import raise_open_files_limit
from verl_mg.distributed.signals import HANDLED_SIGNALS
from verl_mg.distributed.watchdog import EXIT_RANK_LOST
from verl_mg.launch.agent import create_agent, run_agent, shell_code

RESTARTS_OF_CHANGING_NODES = 3  # restarts of a job with spare nodes, or a range of nodes, that does not say how many
MAX_ENGINES = 4096  # connections of engines that may wait to be accepted by a launcher, which accepts none


def run_command(launcher: Launcher, arguments: list[str] | None = None) -> None:
    """Runs torchrun with the given arguments, or with the process's."""
    # Signals upon which torchrun ends the ranks, without those that are forwarded.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGINT,SIGHUP,SIGQUIT")
    raise_open_files_limit()  # the job's store is here, with several connections of each rank
    # They log tracebacks and signals of ranks, which have already said in one line what was wrong.
    for library in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    parsed = _parsed(arguments)
    try:
        if parsed.no_python:
            _forward_signals(lambda: psutil.Process().children())
            run.run(parsed)
        else:
            _run_ranks(parsed, launcher)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        sys.exit(shell_code(failure.exitcode))
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


def _run_ranks(arguments: argparse.Namespace, launcher: Launcher) -> None:
    """Runs the ranks of this node; with restarts they keep their engines."""
    if arguments.num_launchers > 1 and arguments.max_restarts:
        # torchrun's agents share the store of a node that may be lost, and keep its address when the nodes change.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with socket.socket(socket.AF_UNIX) as listener:  # the connections of engines end with this process
        if arguments.max_restarts:
            # The key and the socket are there before the first rank starts.
            launcher.make_key()
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
