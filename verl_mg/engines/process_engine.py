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

The process runs `PYTHON -m MODULE SOCKET`, where MODULE is the host of the engine (see `engine_host`). The end of the
stream ends it together with the engine's processes, unless the engine has an attachment (see `engine_attachment`). A
rank that finds the engine of an earlier one gets its version and what is asleep with the first message.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import select
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from verl_mg.distributed.launcher import Launcher
from verl_mg.engines.engine import EngineDiedError
from verl_mg.engines.engine_attachment import EngineAttachment
from verl_mg.engines.engine_options import EngineOptions, EngineProgram
from verl_mg.engines.kinds import ProcessKind
from verl_mg.engines.ports import BLOCK_SIZE, PortBlock
from verl_mg.engines.request_batch import RequestBatch
from verl_mg.engines.request_tracker import RequestTracker
from verl_mg.errors import UserError

LOG_TAIL_LINES = 12  # lines of an engine's log in an error message
# SGLang logs this for each model class whose optional dependencies are missing.
NOISE = "Ignore import error when loading"
# Last line of a traceback, which vLLM's processes write after their names.
EXCEPTION = re.compile(r"(?:^|[])] )((?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?)$")
# Exceptions of vLLM's processes because another one has ended, of which the log's last lines say more.
CONSEQUENCE = re.compile(r"root cause|RuntimeError: cancelled$")
MESSAGE_CHARACTERS = 300  # the most of an exception in an error
START_SECONDS = 1800.0
CALL_SECONDS = 600.0  # time limits of the start of an engine, and of a call
IDLE_SECONDS = 60.0  # time limit of an engine for ending its requests when they are aborted


class EngineProcess:
    """Handle of an engine process. A thread puts its messages into `inbox`, and None at the end of the stream.

    `child` is None for a process that an earlier rank has started.
    """

    def __init__(
        self,
        engine: str,
        log: Path,
        connection: socket.socket,
        pid: int,
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._engine, self._log, self._reason = engine, log, ""
        self._socket, self._child, self.pid = connection, child, pid
        self._end = os.pidfd_open(pid)  # readable at the end of any process, also of one that is not a child
        self.inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read_messages, daemon=True, name="engine-messages").start()

    @classmethod
    def start(
        cls,
        program: EngineProgram,
        log: Path,
        attachment: EngineAttachment | None = None,
        inherited: Collection[int] = (),
    ) -> EngineProcess:
        """Starts the process of an engine; without an attachment it ends with this rank.

        `inherited` are file descriptors that it keeps open.
        """
        process = cls.importing(program, log, inherited)
        process.begin(program, attachment)
        return process

    @classmethod
    def importing(cls, program: EngineProgram, log: Path, inherited: Collection[int] = ()) -> EngineProcess:
        """Starts the process of an engine, which imports its libraries and waits for `begin`."""
        ours, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output, theirs:  # a copy of `theirs` here would keep the stream open after the process
            child = subprocess.Popen(
                [program.python, "-m", program.module, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *inherited],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(program.environment),
                start_new_session=True,  # Ctrl-C is handled by the job, which ends the engine
            )
        return cls(program.engine, log, ours, child.pid, child)

    def begin(self, program: EngineProgram, attachment: EngineAttachment | None = None) -> None:
        """Starts the engine in its process."""
        complete = asdict(replace(attachment, pid=self.pid)) if attachment else None
        self.send({"arguments": dict(program.arguments), "options": dict(program.options), "attachment": complete})

    def wait_until_ready(self, timeout: float) -> dict[str, Any]:
        """Returns the first message, of a ready engine; UserError with what its log says where it cannot start."""
        try:
            if state := self.inbox.get(timeout=timeout):
                return state
            problem = f"{self._engine}: the engine cannot start{self._reason}"
        except queue.Empty:
            problem = f"{self._engine}: the engine did not start within {timeout:.0f} s"
        self.kill()
        raise UserError(f"{problem}{self._why()}. Correct what it says, or set rollout.engine=hf.")

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; a process that has ended is reported by the inbox instead."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def log_tail(self) -> str:
        """Returns the last lines of the log, each after a line break."""
        with self._log.open(errors="replace") as lines:
            kept = deque((line for line in lines if line.strip() and NOISE not in line), LOG_TAIL_LINES)
        return "".join(f"\n  {line.rstrip()}" for line in kept)

    def _why(self) -> str:
        """Returns what the log says about the end of the process: an exception, or else its last lines."""
        if error := self._logged_error():
            return f": {error[:MESSAGE_CHARACTERS]} (its log: {self._log})"
        return f"; its log {self._log} ends:{self.log_tail()}"

    def _logged_error(self) -> str:
        """Returns the last exception of the log, with the line of the program where it says nothing; else nothing."""
        error = before = ""
        with self._log.open(errors="replace") as lines:
            for line in map(str.rstrip, lines):
                if (match := EXCEPTION.search(line)) and not CONSEQUENCE.search(line):
                    error = match[1].rstrip(".") if ": " in match[1] else f"{match[1]}: {before}"
                if line.strip(" ^~"):
                    before = line.strip()
        return error

    def died(self) -> EngineDiedError:
        """Returns the exception to raise when the stream has ended."""
        self.kill()
        return EngineDiedError(f"the engine's process ended{self._reason}{self._why()}")

    def close(self, timeout: float = 20.0) -> None:
        """Waits for the engine to end, and kills it after `timeout` seconds."""
        self.send({"end": None})
        self.leave()
        self.wait_until_ended(timeout)
        self.kill()

    def leave(self) -> None:
        """Ends this side of the stream; an engine with an attachment waits for the next rank."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)  # the thread still reads what the engine sends

    def wait_until_ended(self, timeout: float | None) -> bool:
        """Waits up to `timeout` seconds for the end of the process, and returns whether it has ended."""
        end = select.poll()  # one for each thread; select.select takes only the first 1024 files
        end.register(self._end, select.POLLIN)
        ended = bool(end.poll(None if timeout is None else 1000 * timeout))
        if ended and self._child:
            self._child.wait()  # a child that is not waited for stays in the table of processes
        return ended

    def kill(self, reason: str = "") -> None:
        """Kills the process and all of the engine's processes; the first reason is part of later errors."""
        self._reason = self._reason or (reason and f" ({reason})")
        # The engine's child processes are in the group of this one, and end with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait_until_ended(None)

    def _read_messages(self) -> None:
        # Consumes the engine's messages; waits for the next line; ends with the stream, whichever side ends it.
        with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                self.inbox.put(json.loads(line))
        self.inbox.put(None)


class OtherNodes(Protocol):
    """Parts of an engine on other nodes than its leader's, as `engine_nodes.LeadingNode` reaches them."""

    def publish(self, ports: Sequence[int]) -> str:
        """Publishes a new start, and returns HOST:PORT at which the parts meet."""
        ...

    def watch(self, process: EngineProcess) -> None:
        """Ends the process of this start when the part of another node has ended."""
        ...


class ImportingProcess:
    """A process that imports an engine's libraries while the rank builds its models."""

    def __init__(self, kind: ProcessKind, model: Path, options: EngineOptions, log: Path) -> None:
        self.ports, self._log = PortBlock(), log
        self._program = kind.program(model, options, self.ports.ports, "")
        self._process = EngineProcess.importing(self._program, log, [self.ports.descriptor])

    def begin(self, program: EngineProgram, log: Path, attachment: EngineAttachment | None) -> EngineProcess | None:
        """Starts an engine in the process; None where it is another program than was expected, or its log."""
        running = self._program
        expected = (running.python, running.module, dict(running.environment), self._log)
        if expected != (program.python, program.module, dict(program.environment), log):
            self._process.kill()
            return None
        self._process.begin(program, attachment)
        return self._process

    def close(self) -> None:
        """Ends the process, which has no engine."""
        self._process.kill()
        self.ports.close()


class ProcessEngine(RequestTracker):
    """An engine in a separate process, started by this rank or by an earlier one.

    It starts with the object, UserError where it cannot. With a launcher it outlives this rank, otherwise it ends with
    the rank. When the process ends unexpectedly, methods raise `EngineDiedError`; then call `restart`, send the
    weights, and call `resume`.
    """

    def __init__(
        self,
        kind: ProcessKind,
        model: Path,
        options: EngineOptions,
        log: Path,
        nodes: OtherNodes | None = None,
        launcher: Launcher | None = None,
        importing: ImportingProcess | None = None,
    ) -> None:
        super().__init__(kind.limits(model, options))
        # GPU: engines release the memory of their weights, caches and graphs in sleep.
        # GPU-TEST: tests/engines/sglang/test_contract.py::test_sleep_releases_all_kinds_of_memory_that_sglang_has,
        # tests/engines/sglang/test_engine.py::test_engine_after_sleep_and_wake_generates_the_same
        # GPU-RAN: h200-1, h100-1
        # On the CPU nothing is released.
        self.options = options if torch.cuda.is_available() else replace(options, sleeps=False)
        self.kind, self._model, self._log, self._nodes = kind, model, log, nodes
        self._results: dict[int, tuple[bool, str]] = {}
        self._loads: dict[int, int | None] = {}
        self._begun: int | None = None  # call of `begin_load` that has not been waited for
        self._process: EngineProcess | None = None
        self._ports: PortBlock | None = None
        self._asleep: set[str] = set()
        self._cache_tokens = 0
        self.chosen: dict[str, str] = {}
        """Kernels and sizes of the started engine, by part, as it says itself."""
        self._launcher, self._importing = launcher, importing
        self._attachment: EngineAttachment | None = None
        if launcher:
            # Ports and address differ from start to start: with fixed ones the digest is the same for each.
            program = kind.program(model, self.options, range(1, BLOCK_SIZE), "")
            self._attachment = EngineAttachment.of_rank(launcher, program.digest)
        if not self._find():
            self.restart()
        elif importing:
            importing.close()

    @property
    def num_adapter_readers(self) -> int:
        """Number of processes that open the memory of `load_adapters`."""
        return self.kind.adapter_readers(self.options.layout)

    @property
    def version(self) -> int:
        """Returns the policy version of the engine's weights; -1: it has none."""
        return self._version

    def _find(self) -> bool:
        """Adopts the process that an earlier rank has left; returns whether there is one."""
        existing = self._attachment.find(START_SECONDS) if self._attachment else None
        if existing is None:
            return False
        connection, state = existing
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            self._process = EngineProcess(self.kind.title, self._log, connection, state["pid"])
            self._version, self._asleep, self._is_paused = state["version"], set(state["asleep"]), False
            self._set_size(state)
        return self._process is not None

    def restart(self) -> None:
        """Starts a new process, without weights; unfinished requests wait for `resume`."""
        self.close()
        importing, self._importing = self._importing, None
        self._ports = importing.ports if importing else PortBlock()
        ports = self._ports.ports
        address = self._nodes.publish(ports) if self._nodes else f"127.0.0.1:{ports[1]}"
        program = self.kind.program(self._model, self.options, ports, address)
        if importing:
            self._process = importing.begin(program, self._log, self._attachment)
        if self._process is None:
            # A process that outlives this rank keeps its ports reserved.
            self._process = EngineProcess.start(program, self._log, self._attachment, [self._ports.descriptor])
        if self._nodes:
            self._nodes.watch(self._process)
        self._set_size(self._process.wait_until_ready(START_SECONDS))
        self._version, self._begun = -1, None
        self._asleep, self._is_paused = set(), False

    def _set_size(self, state: Mapping[str, Any]) -> None:
        """Sets what a started engine says of itself."""
        self.chosen, self._cache_tokens = state["chosen"], state["size"]["cache_tokens"]
        if self.options.max_running is None:
            self._limits = replace(self._limits, max_running=state["size"]["max_running"])

    def num_cache_tokens(self) -> int:
        """Returns the size of the cache as the engine says it."""
        return self._cache_tokens

    def close(self) -> None:
        """Ends the engine's process, unless ranks leave only to start again with other nodes."""
        if self._process is not None:
            if self._launcher and self._launcher.regroup_mark.exists():
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

    def _generate(self, batch: RequestBatch) -> None:
        self._running_process.send({"generate": vars(batch)})

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
            for rid, result in message["samples"].items():
                self._complete(rid, result)

    def pause(self) -> None:
        """Stops generation between two tokens, for an update of the weights with requests in flight."""
        self._is_paused = True
        self._wait(self._call("pause"))

    def unpause(self) -> None:
        """Continues generation after `pause`."""
        self._wait(self._call("unpause"))
        self._is_paused = False

    def begin_load(self) -> None:
        """Starts an update, whose first `load` follows; does not wait for the engine."""
        self._begun = self._call("begin_load")

    def load(self, payloads: Sequence[str], version: int | None) -> int:
        """Starts copying the tensors of the payloads into the parameters; returns a number for `loaded`.

        There is one payload per rank of the engine, and a version with the last ones of an update. No requests may be
        in flight, unless the engine is paused.
        """
        # Keys and values of the old weights must serve no further request, unless the engine is paused to keep them.
        flush = version is not None and not (self._is_paused and self.options.keep_cache)
        number = self._call("load", payloads=list(payloads), version=version, flush=flush)
        self._loads[number] = version
        return number

    def loaded(self, number: int) -> None:
        """Waits until the engine has copied the tensors of a `load`; UserError where its model has others."""
        version = self._loads.pop(number)
        begun, self._begun = self._begun, None
        try:
            if begun is not None:
                self._wait(begun)
            self._wait(number)
        except RuntimeError as error:
            raise UserError(
                f"{error}. It reads another model from config.json than training does: correct the file, or set "
                "rollout.engine=hf."
            ) from None
        if version is not None:
            self._version = version

    def read(self, payloads: Sequence[str], is_last: bool) -> None:
        """Copies parameters into the tensors of the payloads; RuntimeError where its model has others.

        There is one payload per rank of the engine. Requests continue.
        """
        self._wait(self._call("read", payloads=list(payloads), is_last=is_last))

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
        parts = _parts(weights=weights, kv=kv) - self._asleep
        if parts:
            try:
                self._wait(self._call("sleep", weights="weights" in parts, kv="kv" in parts, timeout_s=IDLE_SECONDS))
            except RuntimeError as error:  # training needs the memory now, and the end of the process releases it
                self._version = -1
                self._running_process.kill()
                raise EngineDiedError(f"the engine does not end its requests and was killed ({error})") from None
            self._asleep |= parts
        if weights:
            self._version = -1

    def wake(self, *, weights: bool = True, kv: bool = True) -> None:
        """Allocates released memory again; weights are undefined until an update."""
        if parts := _parts(weights=weights, kv=kv) & self._asleep:
            self._wait(self._call("wake", weights="weights" in parts, kv="kv" in parts))
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
            raise RuntimeError(f"{self.kind.title}: {text}")

    @property
    def _running_process(self) -> EngineProcess:
        if self._process is None:
            raise RuntimeError("the engine is closed")
        return self._process


def _parts(**selected: bool) -> set[str]:
    return {part for part, is_selected in selected.items() if is_selected}
