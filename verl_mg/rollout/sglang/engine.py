"""Requests to an SGLang engine of this job, its weights, its memory, and its restart."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_mg.rollout.engine import EngineDiedError
from verl_mg.rollout.sglang.arguments import EngineSettings, engine_arguments, environment
from verl_mg.rollout.sglang.engine_process_handle import EngineProcess
from verl_mg.rollout.sglang.pp_weight_loader import LOADER, stage_payload
from verl_mg.rollout.sglang.request_tracker import EngineLimits, RequestTracker, routed_shape

START_SECONDS = 1800.0
CALL_SECONDS = 600.0


class SGLangEngine(RequestTracker):
    """One `sglang.Engine` in a process of its own, started by this rank.

    When the process ends by itself, any method raises `EngineDiedError`; then `restart`, bring the weights, `resume`.
    Raises UserError with the end of the engine's log where it cannot start.
    """

    def __init__(self, model: Path, settings: EngineSettings, log: Path, request_timeout: float = 3600.0) -> None:
        arguments = engine_arguments(model, settings)
        limits = EngineLimits(
            max_running=settings.max_running,
            max_positions=settings.max_positions,
            seeded=bool(arguments.get("enable_deterministic_inference")),
            routed=routed_shape(model) if settings.routed_experts else None,
        )
        super().__init__(limits, request_timeout)
        self.settings, self._log, self._arguments = settings, log, arguments
        self._answers: dict[int, tuple[bool, str]] = {}
        self._process: EngineProcess | None = None
        self.restart()

    # -- life

    def restart(self) -> None:
        """A new process, without weights; what was unfinished waits for `resume`."""
        self.close()
        self._process = EngineProcess(self._arguments, environment(self.settings.layout), self._log)
        self._process.wait_until_ready(START_SECONDS)
        self._version = -1
        self._asleep: set[str] = set()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    @property
    def pid(self) -> int:
        """Of the host process."""
        return self._host.pid

    def health(self) -> bool:
        """Whether there are weights."""
        return self._process is not None and self._version >= 0

    # -- samples

    def abort(self) -> None:
        """See `RolloutEngine`."""
        self._host.send({"abort": None})

    def _generate(self, rid: str, fields: dict[str, Any]) -> None:
        self._host.send({"generate": rid, "fields": fields})

    def _cut(self, rid: str) -> None:
        self._host.send({"abort": rid})

    def _receive(self, timeout: float) -> None:
        self._take(self._host.inbox.get(timeout=timeout))

    def _take(self, message: dict[str, Any] | None) -> None:
        if message is None:
            self._version = -1
            self._host.inbox.put(None)  # whoever asks again is told again
            raise self._host.died()
        if "call" in message:
            self._answers[message["call"]] = message["ok"], message["message"]
        else:
            self._answered(message["sample"], message)

    # -- weights and memory

    def begin_update(self) -> None:
        """Open the weights for writing; nothing may be in flight."""
        self._wait(self._call("begin_weight_update"))

    def load(self, payloads: Sequence[str], version: int | None) -> int:
        """Begin to copy the tensors of the payloads, one a rank, into the parameters; a number for `loaded`.

        `version` comes with the last ones: the cache of the old weights is flushed with them.
        """
        tp, pp = self.settings.layout.tp, self.settings.layout.pp
        # SGLang has a payload for each tensor-parallel rank, whatever its stage.
        of_stages = [stage_payload(payloads[rank::tp]) for rank in range(tp)] if pp > 1 else list(payloads)
        return self._call(
            "update_weights_from_tensor",
            serialized_named_tensors=of_stages,
            load_format="direct" if pp == 1 else LOADER,
            flush_cache=version is not None,
            weight_version=None if version is None else str(version),
        )

    def loaded(self, number: int) -> None:
        """Wait until the engine has copied what `load` gave it."""
        self._wait(number)

    def end_update(self, version: int) -> None:
        """Take the weights into use as number `version`."""
        self._wait(self._call("end_weight_update"))
        # What SGLang derives from weights (MLA's w_kc and w_vc) it derives anew in a session without a load.
        self._wait(self._call("begin_weight_update"))
        self._wait(self._call("end_weight_update"))
        self._version = version

    def sleep(self, *, weights: bool = True, kv: bool = True) -> None:
        """Give back the memory of the weights, whose values are lost, and of the key-value cache."""
        if tags := _tags(weights, kv) - self._asleep:
            self._wait(self._call("release_memory_occupation", tags=sorted(tags)))
            self._asleep |= tags
        if weights:
            self._version = -1

    def wake(self, *, weights: bool = True, kv: bool = True) -> None:
        """Take again the memory that was given back."""
        if tags := _tags(weights, kv) & self._asleep:
            self._wait(self._call("resume_memory_occupation", tags=sorted(tags)))
            self._asleep -= tags

    def _call(self, method: str, **fields: Any) -> int:
        number = next(self._numbers)
        self._host.send({"call": number, "method": method, "fields": fields})
        return number

    def _wait(self, number: int) -> None:
        until = time.monotonic() + CALL_SECONDS
        while number not in self._answers:
            try:
                self._take(self._host.inbox.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                late = f"the engine has not answered for {CALL_SECONDS:.0f} s; its log ends:{self._host.last()}"
                raise EngineDiedError(late) from None
        ok, text = self._answers.pop(number)
        if not ok:
            raise RuntimeError(f"SGLang: {text}")

    @property
    def _host(self) -> EngineProcess:
        if self._process is None:
            raise RuntimeError("the engine is closed")
        return self._process


def _tags(weights: bool, kv: bool) -> set[str]:
    return {tag for tag, wanted in (("kv_cache", kv), ("weights", weights)) if wanted}
