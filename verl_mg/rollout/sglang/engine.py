"""SGLang engine that this job starts: requests, weights, memory and restart."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_mg.rollout.engine import EngineDiedError
from verl_mg.rollout.sglang.arguments import EngineSettings, engine_arguments, environment, port_arguments
from verl_mg.rollout.sglang.engine_process import EngineProcess
from verl_mg.rollout.sglang.ports import PortBlock
from verl_mg.rollout.sglang.request_tracker import EngineLimits, RequestTracker, routed_shape
from verl_mg.rollout.sglang.weight_loader import LOADER, merge_stages

START_SECONDS = 1800.0
CALL_SECONDS = 600.0
IDLE_SECONDS = 60.0
"""Time limit of an engine for ending its requests when they are aborted."""


class SGLangEngine(RequestTracker):
    """An `sglang.Engine` in a separate process, started by this rank.

    When the process ends unexpectedly, methods raise `EngineDiedError`; then call `restart`, send the weights, and
    call `resume`.
    """

    def __init__(self, model: Path, settings: EngineSettings, log: Path, request_timeout: float = 3600.0) -> None:
        """Starts the process.

        Args:
            model: Hugging Face directory.
            settings: settings of the engine.
            log: file to which the engine's output is appended.
            request_timeout: seconds after which a request is aborted.

        Raises:
            UserError: the engine cannot start; the message contains the end of its log.
        """
        arguments = engine_arguments(model, settings)
        limits = EngineLimits(
            max_running=settings.max_running,
            max_positions=settings.max_positions,
            seeded=bool(arguments.get("enable_deterministic_inference")),
            routed=routed_shape(model) if settings.routed_experts else None,
        )
        super().__init__(limits, request_timeout)
        self.settings, self._log, self._arguments = settings, log, arguments
        self._results: dict[int, tuple[bool, str]] = {}
        self._process: EngineProcess | None = None
        self._ports: PortBlock | None = None
        self.restart()

    def restart(self) -> None:
        """Starts a new process, without weights; unfinished requests wait for `resume`."""
        self.close()
        self._ports = PortBlock()
        arguments = port_arguments(self._ports.ports) | self._arguments
        self._process = EngineProcess(arguments, environment(self.settings), self._log)
        self._process.wait_until_ready(START_SECONDS)
        self._version = -1
        self._asleep: set[str] = set()

    def close(self) -> None:
        """Ends the engine's process."""
        if self._process is not None:
            self._process.close()
            self._process = None
        if self._ports is not None:
            self._ports.close()

    @property
    def pid(self) -> int:
        """Process id of the engine process."""
        return self._host.pid

    def health(self) -> bool:
        """Returns whether the weights have been sent."""
        return self._process is not None and self._version >= 0

    def abort(self) -> None:
        """Aborts all requests in flight."""
        self._host.send({"abort": None})

    def _generate(self, rid: str, fields: dict[str, Any]) -> None:
        self._host.send({"generate": rid, "fields": fields})

    def _abort_request(self, rid: str) -> None:
        self._host.send({"abort": rid})

    def _receive(self, timeout: float) -> None:
        self._handle(self._host.inbox.get(timeout=timeout))

    def _handle(self, message: dict[str, Any] | None) -> None:
        if message is None:
            self._version = -1
            self._host.inbox.put(None)  # every further call raises too
            raise self._host.died()
        if "call" in message:
            self._results[message["call"]] = message["ok"], message["message"]
        else:
            self._complete(message["sample"], message)

    def begin_update(self) -> None:
        """Begins an update of the weights; no requests may be in flight."""
        self._wait(self._call("begin_weight_update"))

    def load(self, payloads: Sequence[str], version: int | None) -> int:
        """Starts copying the tensors of the payloads into the parameters.

        Args:
            payloads: one payload per rank of the engine.
            version: policy version, with the last payloads of an update: they flush the cache of the old weights.

        Returns:
            A number for `loaded`.
        """
        tp = self.settings.layout.tp
        return self._call(
            "update_weights_from_tensor",
            serialized_named_tensors=[merge_stages(payloads[rank::tp]) for rank in range(tp)],
            load_format=LOADER,
            flush_cache=version is not None,
            weight_version=None if version is None else str(version),
        )

    def loaded(self, number: int) -> None:
        """Waits until the engine has copied the tensors of a `load`."""
        self._wait(number)

    def end_update(self, version: int) -> None:
        """Ends an update; the weights are policy version `version` from now on."""
        self._wait(self._call("end_weight_update"))
        # SGLang recomputes derived weights (MLA's w_kc and w_vc) in a session without a load.
        self._wait(self._call("begin_weight_update"))
        self._wait(self._call("end_weight_update"))
        self._version = version

    def sleep(self, *, weights: bool = True, kv: bool = True) -> None:
        """Releases memory of the engine; requests in flight are aborted.

        Args:
            weights: whether to release the weights, whose values are lost.
            kv: whether to release the key-value cache.

        Raises:
            EngineDiedError: the engine does not end its requests; its process is killed, which releases the memory.
        """
        if tags := _tags(weights, kv) - self._asleep:
            self._end_requests()
            self._wait(self._call("release_memory_occupation", tags=sorted(tags)))
            self._asleep |= tags
        if weights:
            self._version = -1

    def wake(self, *, weights: bool = True, kv: bool = True) -> None:
        """Allocates released memory again.

        Args:
            weights: whether to allocate the weights, which remain undefined until an update.
            kv: whether to allocate the key-value cache.
        """
        if tags := _tags(weights, kv) & self._asleep:
            self._wait(self._call("resume_memory_occupation", tags=sorted(tags)))
            self._asleep -= tags

    def _end_requests(self) -> None:
        """Aborts all requests and waits until SGLang is idle: else its schedulers end when they release memory."""
        try:
            self._wait(self._call("become_idle", timeout_s=IDLE_SECONDS))
        except RuntimeError as error:
            self._version = -1
            self._host.kill()
            raise EngineDiedError(f"the engine does not end its requests and was killed ({error})") from None

    def _call(self, method: str, **fields: Any) -> int:
        number = next(self._numbers)
        self._host.send({"call": number, "method": method, "fields": fields})
        return number

    def _wait(self, number: int) -> None:
        deadline = time.monotonic() + CALL_SECONDS
        while number not in self._results:
            try:
                self._handle(self._host.inbox.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                log = self._host.log_tail()
                raise EngineDiedError(
                    f"the engine does not respond for {CALL_SECONDS:.0f} s; its log ends:{log}"
                ) from None
        ok, text = self._results.pop(number)
        if not ok:
            raise RuntimeError(f"SGLang: {text}")

    @property
    def _host(self) -> EngineProcess:
        if self._process is None:
            raise RuntimeError("the engine is closed")
        return self._process


def _tags(weights: bool, kv: bool) -> set[str]:
    """Returns SGLang's names of what is selected; its graphs are only needed together with the cache."""
    return {tag for tag, selected in (("kv_cache", kv), ("cuda_graph", kv), ("weights", weights)) if selected}
