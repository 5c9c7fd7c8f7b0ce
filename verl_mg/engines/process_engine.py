"""Engine in a separate process, which this rank starts or finds: requests, weights, memory and restart.

    rank's process                                      engine's process, which leads a session and a process group
    +--------------------------------------+            +----------------------------------------------------+
    | calling thread: ProcessEngine        |   socket   | main thread: event loop of EngineHost              |
    |   EngineProcess.send --------------- | -- pair -> |   _serve_rank --> a task for each message          |
    |   inbox <-- thread "engine-messages" | <- lines - |   samples, answers to calls                        |
    | pidfd: end of the engine's process   |   of JSON  |   SGLang's tokenizer manager, or vLLM's AsyncLLM   |
    | PortBlock: a bound port ------------ | inherited> |   keeps the block of ports reserved                |
    | Staging: shared memory ------------- | by name -> | child processes of the engine: schedulers, workers |
    +--------------------------------------+            | with a launcher: EngineListener, for the next rank,|
                                                        |   and a connection that ends with the launcher     |
                                                        +----------------------------------------------------+

    bare (version -1) --loads of all weights--> ready --pause--> paused --loads, unpause--> ready
    ready --sleep of the weights--> asleep --wake--> bare
    ready --the process ends--> dead: methods raise `EngineDiedError` --restart--> bare --weights, resume--> ready

A rank that finds the engine of an earlier one gets its version and what is asleep with the first message.
"""

from __future__ import annotations

import queue
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from verl_mg.distributed.launcher import Launcher
from verl_mg.engines.engine import EngineDiedError
from verl_mg.engines.engine_adapters import AdapterSettings
from verl_mg.engines.engine_attachment import EngineAttachment
from verl_mg.engines.engine_nodes import ONE_NODE, EngineNodes, LeadingNode
from verl_mg.engines.engine_process import EngineProcess, EngineProgram
from verl_mg.engines.ports import BLOCK_SIZE, PortBlock
from verl_mg.engines.request_tracker import EngineLimits, RequestTracker
from verl_mg.layout import EngineLayout

START_SECONDS = 1800.0
CALL_SECONDS = 600.0  # time limits of the start of an engine, and of a call
IDLE_SECONDS = 60.0  # time limit of an engine for ending its requests when they are aborted


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings with which an engine is started."""

    layout: EngineLayout
    dtype: torch.dtype
    quantization: Mapping[str, Any] | None = None
    """Field `quantization_config` of the engine's weights; None: they are not quantized, whatever config.json says."""
    max_running: int  # largest number of requests at the same time
    max_positions: int  # largest number of tokens of a prompt with its response
    memory_fraction: float = 0.6  # share of a GPU's memory for weights and key-value cache
    first_gpu: int = 0
    nodes: EngineNodes = ONE_NODE  # nodes over which the engine is spread
    gpu_step: int = 1  # distance between the indices of two GPUs of the engine
    sleeps: bool = True  # whether the engine can release its memory, which costs some speed; on GPUs
    seed: int = 0
    routed_experts: bool = False  # whether samples contain the experts of each token
    deterministic: bool = False  # whether a sample depends only on its seed, and not on concurrent requests; on GPUs
    reads_text: bool = False  # whether the engine has the tokenizer, to end responses at stop strings
    adapters: AdapterSettings | None = None  # adapters that the engine receives; None: it has only weights
    python: Path | None = None  # interpreter of the engine's process; None: this process's
    extra: Mapping[str, Any] = field(default_factory=dict)  # further arguments by the engine's names, which win


class ProcessEngine(RequestTracker):
    """An engine in a separate process, started by this rank or by an earlier one; subclasses define what it runs.

    It starts with the object, UserError where it cannot. With a launcher it outlives this rank, otherwise it ends with
    the rank. When the process ends unexpectedly, methods raise `EngineDiedError`; then call `restart`, send the
    weights, and call `resume`.
    """

    NAME: ClassVar[str]  # name of the kind of engine, in messages

    @property
    @abstractmethod
    def num_adapter_readers(self) -> int:
        """Number of processes that open the memory of `load_adapters`."""

    def __init__(
        self,
        settings: EngineSettings,
        limits: EngineLimits,
        log: Path,
        request_timeout: float,
        nodes: LeadingNode | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        super().__init__(limits, request_timeout)
        self.settings, self._log, self._nodes = settings, log, nodes
        self._results: dict[int, tuple[bool, str]] = {}
        self._loads: dict[int, int | None] = {}
        self._process: EngineProcess | None = None
        self._ports: PortBlock | None = None
        self._asleep: set[str] = set()
        self._launcher = launcher
        self._attachment = self._new_attachment(launcher) if launcher else None
        if not self._find():
            self.restart()

    @abstractmethod
    def _program(self, ports: Sequence[int], address: str) -> EngineProgram:
        """Returns what the process runs, with the engine's free ports and HOST:PORT at which its processes meet."""

    @property
    def version(self) -> int:
        """Returns the policy version of the engine's weights; -1: it has none."""
        return self._version

    def _new_attachment(self, launcher: Launcher) -> EngineAttachment:
        # The digest must be the same for every start of the program: ports and address differ, so it has fixed ones.
        digest = self._program(range(1, BLOCK_SIZE), "").digest
        return EngineAttachment.of_rank(
            launcher,
            digest,
            deterministic=self.settings.deterministic,
            sleeps=self.settings.sleeps and torch.cuda.is_available(),
        )

    def _find(self) -> bool:
        """Adopts the process that an earlier rank has left; returns whether there is one."""
        if self._attachment is None:
            return False
        existing = EngineProcess.find(self.NAME, self._log, self._attachment, START_SECONDS)
        if existing is None:
            return False
        self._process, state = existing
        self._version, self._asleep, self._keeps_cache = state.version, set(state.asleep), False
        return True

    def restart(self) -> None:
        """Starts a new process, without weights; unfinished requests wait for `resume`."""
        self.close()
        self._ports = PortBlock()
        ports = self._ports.ports
        address = self._nodes.publish(ports) if self._nodes else f"127.0.0.1:{ports[1]}"
        self._process = EngineProcess.start(
            self._program(ports, address),
            self._log,
            self._attachment,
            [self._ports.descriptor],  # a process that outlives this rank keeps its ports reserved
        )
        if self._nodes:
            self._nodes.watch(self._process)
        self._process.wait_until_ready(START_SECONDS)
        self._version = -1
        self._asleep, self._keeps_cache = set(), False

    def close(self) -> None:
        """Ends the engine's process, unless ranks leave only to start again with other nodes."""
        if self._process is not None:
            if self._launcher and self._launcher.regroups:
                self._process.leave()
            else:
                self._process.close()
            self._process = None
        if self._ports is not None:
            self._ports.close()

    @property
    def pid(self) -> int:
        """Process id of the engine process."""
        return self._running_process.pid

    def health(self) -> bool:
        """Returns whether the weights have been sent."""
        return self._process is not None and self._version >= 0

    def abort(self) -> None:
        """Aborts all requests in flight."""
        self._running_process.send({"abort": None})

    def _generate(self, rid: str, request: dict[str, Any]) -> None:
        self._running_process.send({"generate": rid, "request": request})

    def _abort_request(self, rid: str) -> None:
        self._running_process.send({"abort": rid})

    def _receive(self, timeout: float) -> None:
        self._handle(self._running_process.inbox.get(timeout=timeout))

    def _handle(self, message: dict[str, Any] | None) -> None:
        if message is None:
            self._version = -1
            self._running_process.inbox.put(None)  # every further call raises too
            raise self._running_process.died()
        if "call" in message:
            self._results[message["call"]] = message["ok"], message["message"]
        else:
            self._complete(message["sample"], message)

    def pause(self, *, keep_cache: bool) -> None:
        """Stops generation between two tokens, for an update of the weights with requests in flight.

        With `keep_cache` requests continue on keys and values of the old weights; else these are computed again.
        """
        self._keeps_cache = keep_cache
        self._wait(self._call("pause", keep_cache=keep_cache))

    def unpause(self) -> None:
        """Continues generation after `pause`."""
        self._wait(self._call("unpause"))
        self._keeps_cache = False

    def load(self, payloads: Sequence[str], version: int | None) -> int:
        """Starts copying the tensors of the payloads into the parameters; returns a number for `loaded`.

        There is one payload per rank of the engine, and a version with the last ones of an update. No requests may be
        in flight, unless the engine is paused.
        """
        # Keys and values of the old weights must serve no further request, unless the engine is paused to keep them.
        flush = version is not None and not self._keeps_cache
        number = self._call("load", payloads=list(payloads), version=version, flush=flush)
        self._loads[number] = version
        return number

    def loaded(self, number: int) -> None:
        """Waits until the engine has copied the tensors of a `load`."""
        version = self._loads.pop(number)
        self._wait(number)
        if version is not None:
            self._version = version

    def load_adapters(self, payloads: Sequence[str], version: int, config: Mapping[str, Any]) -> None:
        """Replaces the adapters with which all further requests are computed; none may be in flight.

        There is one payload, of all whole tensors, for each of `num_adapter_readers`. `config` has PEFT's fields.
        """
        self._wait(self._call("load_adapters", payloads=list(payloads), version=version, config=dict(config)))
        self._version = version

    def sleep(self, *, weights: bool = True, kv: bool = True) -> None:
        """Releases memory of the engine; requests in flight are aborted, and the values of released weights are lost.

        EngineDiedError where the engine does not end its requests: it is killed, which releases the memory.
        """
        parts = _parts(weights, kv) - self._asleep
        if parts:
            try:
                self._wait(self._call("sleep", **_selection(parts), timeout_s=IDLE_SECONDS))
            except RuntimeError as error:  # training needs the memory now, and the end of the process releases it
                self._version = -1
                self._running_process.kill()
                raise EngineDiedError(f"the engine does not end its requests and was killed ({error})") from None
            self._asleep |= parts
        if weights:
            self._version = -1

    def wake(self, *, weights: bool = True, kv: bool = True) -> None:
        """Allocates released memory again; weights are undefined until an update."""
        if parts := _parts(weights, kv) & self._asleep:
            self._wait(self._call("wake", **_selection(parts)))
            self._asleep -= parts

    def _call(self, method: str, **fields: Any) -> int:
        number = next(self._numbers)
        self._running_process.send({"call": number, "method": method, "fields": fields})
        return number

    def _wait(self, number: int) -> None:
        deadline = time.monotonic() + CALL_SECONDS
        process = self._running_process
        while number not in self._results:  # samples, and answers to other calls, arrive before
            try:
                self._handle(process.inbox.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                raise EngineDiedError(
                    f"the engine does not respond for {CALL_SECONDS:.0f} s; its log ends:{process.log_tail()}"
                ) from None
        ok, text = self._results.pop(number)
        if not ok:
            raise RuntimeError(f"{self.NAME}: {text}")

    @property
    def _running_process(self) -> EngineProcess:
        if self._process is None:
            raise RuntimeError("the engine is closed")
        return self._process


def _parts(weights: bool, kv: bool) -> set[str]:
    return {part for part, selected in (("weights", weights), ("kv", kv)) if selected}


def _selection(parts: set[str]) -> dict[str, bool]:
    return {"weights": "weights" in parts, "kv": "kv" in parts}
