"""Agent of a node that starts its ranks, with restarts also after a loss: torchrun's, with other ways to do so.

    a rank ends     ──▶  the agent ends the others immediately; all nodes meet again and start their ranks
    a node is lost  ──▶  the watchdog misses its ranks, the rendezvous the node; a spare node takes its place, or the
                         others continue without it where --nnodes MIN:MAX allows that
    a node arrives  ──▶  ranks are asked to stop: they save a checkpoint and leave; then all nodes meet again

Engines that the launcher keeps outlive all of this. States of the ranks of a node, as torch names them:

    rendezvous ─▶ HEALTHY ─┬─ all programs are complete ─▶ SUCCEEDED: the launcher ends
        ▲                  ├─ a rank ended before ─▶ FAILED, `_after_loss` ─▶ the launcher ends, or SIGKILL ─┐
        │                  ├─ nodes wait, one of them has LOST a rank ─▶ SIGKILL ──────────────────────────┤
        │                  └─ nodes wait to join ─▶ SIGTERM: ranks save a checkpoint and leave ────────────┤
        └──────────────────────────────────────────────────────────────────────────────────────────────────┘

The main thread runs torch's loop: it looks at the ranks and for waiting nodes every `--monitor-interval` seconds, and
ends with the job. A thread for each start of ranks (`_end_others`) waits for their ends, and until they are seen.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from typing import Any

import psutil
from torch.distributed import run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig, _get_addr_and_port

from verl_mg.distributed.launcher import ITERATION, STARTED, STOP_CODE, Launcher
from verl_mg.distributed.signals import SIGNAL_CODES
from verl_mg.errors import EXIT_CODE
from verl_mg.launch.program import forks_can_use_devices, run_program

VERDICT_SECONDS = 0.5  # time for ranks to end by themselves after the first of them: the one that prints why ends last
LEAVE_SECONDS = 24 * 3600  # time for ranks to save and leave when nodes arrive; hung ones are ended by the watchdog
UNSEEN_SECONDS = 10.0  # time in which an agent should see the ends of its ranks, after it has looked again
LOST = "lost"  # key of the rendezvous: a node has lost a rank
FIRST_PAUSE_SECONDS = 1.0  # pause before a restart after the same failure as the time before; it doubles each time
LONGEST_PAUSE_SECONDS = 60.0
MAX_SAME_FAILURES = 3  # the job ends when the ranks have ended so often with the same code in the same iteration


class RankAgent(LocalElasticAgent):
    """Agent of a node: starts its ranks, monitors and restarts them. `forks`: by the fork server of `program`."""

    def __init__(self, spec: WorkerSpec, config: LaunchConfig, launcher: Launcher, forks: bool) -> None:
        seconds = getattr(config, "shutdown_timeout", None)  # not in torch 2.11
        limit: dict[str, Any] = {} if seconds is None else {"shutdown_timeout": seconds}
        super().__init__(
            spec,
            config.logs_specs,  # type: ignore[arg-type]  # torchrun sets it
            "forkserver" if forks else "spawn",
            log_line_prefix_template=config.log_line_prefix_template,
            **limit,
        )
        self._launcher, self._policy, self._forks = launcher, RestartPolicy(), forks
        self._end_is_seen = threading.Event()  # whether this agent has seen the end of the ranks, or ends them
        self.stops = False  # whether the ranks were asked to stop from outside

    @property
    def ranks(self) -> list[psutil.Process]:
        """Processes of this node's ranks."""
        return [psutil.Process(pid) for pid in self._pids() if psutil.pid_exists(pid)]

    def _pids(self) -> list[int]:
        return [worker.id for worker in self.get_worker_group().workers if worker.id is not None]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._launcher.clear()
        self._end_is_seen.clear()
        again = self._launcher.number(STARTED) > 0
        self._launcher.report(STARTED, int(1000 * (time.time() if again else psutil.Process().create_time())))
        pids = super()._start_workers(worker_group)
        threading.Thread(target=self._end_others, args=(list(pids.values()),), daemon=True).start()
        return pids

    def _end_others(self, pids: list[int]) -> None:
        """Ends all ranks soon after the first that ends before its program is complete, if they start again."""
        # The loop of a thread: consumes the ends of ranks, and ends itself after the last one or the first early one.
        # torch's own loop would send SIGTERM, at which ranks try to write a checkpoint without the lost one. A job that
        # ends with the loss has time for that: its watchdog names the lost rank.
        # A descriptor of a process is readable when it has ended, and leaves its exit code to torch.
        ends = select.poll()
        alive: dict[int, int] = {}
        for pid in pids:
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                alive[descriptor] = pid
                ends.register(descriptor, select.POLLIN)
        spec = self.get_worker_group().spec
        restarts = spec.max_restarts > 0
        complete = len(alive) == len(pids)
        while alive and (complete or not restarts):
            for descriptor, _ in ends.poll():
                ends.unregister(descriptor)
                os.close(descriptor)
                complete = self._launcher.return_mark(alive.pop(descriptor)).exists() and complete
        if not complete and restarts:
            time.sleep(VERDICT_SECONDS)
        for pid in alive.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not self._end_is_seen.wait(UNSEEN_SECONDS + spec.monitor_interval):
            # The main thread hangs in a request to a host that is cut off: the process cannot end in the regular way.
            shutil.rmtree(self._launcher.folder, ignore_errors=True)
            os._exit(max(shell_code(code) for code in self._exit_codes()))

    def _exit_codes(self) -> list[int]:
        """Returns the exit codes of ranks that have ended."""
        context: Any = self._pcontext
        if self._forks:
            return [rank.exitcode or 0 for rank in context._pc.processes]
        return [rank.proc.wait() for rank in context.subprocess_handlers.values()]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state != WorkerState.HEALTHY:
            self._end_is_seen.set()
        stopped = self._launcher.number(STOP_CODE) > SIGNAL_CODES
        if result.is_failed():
            self._after_loss(worker_group, result)
        elif result.state == WorkerState.SUCCEEDED and stopped and not self.stops:
            waiting = worker_group.spec.rdzv_handler.num_nodes_waiting()
            # Where nodes wait to join, another node's agent has asked the ranks to leave. torch restarts healthy ranks
            # where nodes wait, and ends the job after SUCCEEDED.
            return RunResult(WorkerState.HEALTHY) if waiting else result
        return result

    def _after_loss(self, worker_group: WorkerGroup, result: RunResult) -> None:
        """Reports a loss to the other nodes and waits before a restart; ChildFailedError where the job ends."""
        error = ChildFailedError(worker_group.spec.role, result.failures)
        rank, failure = error.get_first_failure()
        iteration = self._launcher.number(ITERATION)
        pause = None if self.stops else self._policy.pause(failure.exitcode, iteration)
        left = self._remaining_restarts
        if pause is None or not left:
            raise error
        with suppress(RuntimeError):  # the rendezvous may be on a host that is lost
            worker_group.store.set(LOST, str(rank))  # type: ignore[attr-defined]
        where = f"rank {rank} (host {socket.gethostname()}, pid {failure.pid})"
        print(
            f"launcher: {where} {_end(failure.exitcode)} after iteration {iteration}; all ranks start "
            f"again in {pause:.0f} s, {left - 1} restarts are left",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(pause)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._end_is_seen.set()
        # Healthy ranks are stopped for nodes that arrive, or for a node that starts again after a loss: in that case
        # the ranks cannot complete a checkpoint.
        healthy = worker_group.state == WorkerState.HEALTHY
        if healthy and not worker_group.store.check([LOST]):  # type: ignore[attr-defined]
            self._launcher.regroup_mark.touch()
            self._shutdown(signal.SIGTERM, LEAVE_SECONDS)
        else:
            self._shutdown(signal.SIGKILL)


def shell_code(exit_code: int) -> int:
    """Returns the exit code as shells know it: 128 + signal for a process that was ended by one."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def _end(exit_code: int) -> str:
    return f"was ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with code {exit_code}"


def create_agent(arguments: argparse.Namespace, launcher: Launcher) -> RankAgent:
    """Returns the agent of this node for torchrun's arguments."""
    config, python, words = run.config_from_args(arguments)
    forks = forks_can_use_devices()
    parameters = RendezvousParameters(
        config.rdzv_backend,
        config.rdzv_endpoint,
        config.run_id or str(uuid.uuid4()),
        config.min_nodes,
        config.max_nodes,
        config.local_addr,
        **config.rdzv_configs,
    )
    address, port = _get_addr_and_port(parameters)  # of a static rendezvous
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=run_program if forks else python,
        args=tuple(words if forks else ["-u", "-m", run_program.__module__, *words]),
        rdzv_handler=get_rendezvous_handler(parameters),
        master_addr=address,
        master_port=port,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )
    # Ranks are ended by this agent; torchrun's own handlers are for the signals that end it.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    return RankAgent(spec, config, launcher, forks)


def run_agent(agent: RankAgent) -> None:
    """Runs the ranks of this node until the job ends; ChildFailedError where a rank has failed for the last time."""
    handler, closes = agent.get_worker_group().spec.rdzv_handler, True
    try:
        result = agent.run()
        if result is not None and result.is_failed():
            raise ChildFailedError(agent.get_worker_group().spec.role, result.failures)
    except SignalException:
        closes = False  # as torchrun does: other nodes continue
        raise
    finally:
        if closes:
            handler.shutdown()


class RestartPolicy:
    """The losses of a job so far."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None
        self._num_same = 0

    def pause(self, exit_code: int, iteration: int) -> float | None:
        """Returns the seconds to wait before a restart; None where the job ends. A negative code is minus a signal."""
        # Invalid input stays invalid, and a failure that comes again in the same iteration has a cause in the job.
        if exit_code == EXIT_CODE:
            return None
        failure = exit_code, iteration
        self._num_same = self._num_same + 1 if failure == self._last else 1
        self._last = failure
        if self._num_same >= MAX_SAME_FAILURES:
            return None
        if self._num_same == 1:
            return 0.0
        return min(FIRST_PAUSE_SECONDS * 2.0 ** (self._num_same - 2), LONGEST_PAUSE_SECONDS)
