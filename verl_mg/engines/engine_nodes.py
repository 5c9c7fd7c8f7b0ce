"""Engines over several nodes: the parts of an engine on the nodes of the other ranks, and how they find each other.

    leading rank                          job's store, "engine N/"     thread "engine-node" of a rank on each other node
    publish: start number k      ---->    start/k = HOST:PORT   ---->  kills its part of k - 1, starts its part of k
    thread "engine-nodes": kills <----    lost/k = reason       <----  its part has ended
      its own part; the engine is
      restarted as a whole: k + 1

Everything goes through the store, so that a restart needs no rank to leave its computation.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import PrefixStore, Store

from verl_mg.distributed.outside_group import local_address
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.kinds import ProcessKind
from verl_mg.engines.ports import PortBlock
from verl_mg.engines.process_engine import EngineProcess

POLL_SECONDS = 0.5  # interval at which each side looks into the store
CLOSE_SECONDS = 20.0  # time limit of the leader for ending the parts on other nodes

log = logging.getLogger(__name__)


class LeadingNode:
    """The side of the rank that leads an engine over several nodes."""

    def __init__(self, store: Store, number: int, address: str) -> None:
        self._address = address
        self._store = PrefixStore(f"engine {number}", store)
        self._attempt = -1

    def publish(self, ports: Sequence[int]) -> str:
        """Publishes a new start, and returns HOST:PORT at which the parts meet; the other nodes start theirs."""
        self._attempt += 1
        address = f"{self._address}:{ports[1]}"  # the first port is SGLang's for NCCL
        self._store.set(f"start/{self._attempt}", address)
        return address

    def watch(self, process: EngineProcess) -> None:
        """Ends the process of this start when the part of another node has ended."""
        attempt = self._attempt

        def wait() -> None:
            # Waits for the end of the process or for a report of this start; polls both.
            while not process.wait_until_ended(POLL_SECONDS):
                if self._store.check([f"lost/{attempt}"]):
                    process.kill(self._store.get(f"lost/{attempt}").decode())
                    return

        threading.Thread(target=wait, daemon=True, name="engine-nodes").start()


class FollowingNode:
    """The side of a rank whose node has a part of an engine that another node's rank leads."""

    def __init__(
        self, kind: ProcessKind, model: Path, options: EngineOptions, log_file: Path, store: Store, number: int
    ) -> None:
        self._store = PrefixStore(f"engine {number}", store)
        self._kind, self._model, self._options, self._log_file = kind, model, options, log_file
        self._ports = PortBlock()
        self._stop = threading.Event()
        self._process: EngineProcess | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine-node")
        self._thread.start()

    def close(self) -> None:
        """Waits for the end of this node's part, and ends it after CLOSE_SECONDS."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        attempt = 0
        # Consumes starts of the leader; polls the store and its part of the engine; ends by `close`.
        while not self._stop.is_set():
            if self._store.check([f"start/{attempt}"]):
                if self._process:
                    self._process.kill()
                address = self._store.get(f"start/{attempt}").decode()
                program = self._kind.program(self._model, self._options, self._ports.ports, address)
                self._process = EngineProcess.start(program, self._log_file)
                attempt += 1
            elif self._process and self._process.wait_until_ended(POLL_SECONDS):
                self._report(attempt - 1, self._process)
                self._process = None
            elif not self._process:
                self._stop.wait(POLL_SECONDS)
        # The leader ends all parts; one that ended before the others would look lost to them.
        if self._process and not self._process.wait_until_ended(CLOSE_SECONDS):
            self._process.close()

    def _report(self, attempt: int, process: EngineProcess) -> None:
        reason = f"its part on another node ended; the log there, {self._log_file}, ends:{process.log_tail()}"
        process.kill()
        log.warning("rollout: %s", reason)
        self._store.set(f"lost/{attempt}", reason)


def node_address(store: Store) -> str:
    """Returns the address under which other nodes reach this one: of the interface towards the job's TCP store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return local_address([f"http://{getattr(store, 'host', '127.0.0.1')}"])
