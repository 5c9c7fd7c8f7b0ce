"""Requests to an SGLang engine of this job, its weights, its memory, and its restart."""

from __future__ import annotations

import base64
import itertools
import queue
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_mg.errors import UserError
from verl_mg.rollout.engine import EngineDiedError, Finish, Request, RolloutEngine, Sample, Sampling
from verl_mg.rollout.sglang.arguments import EngineSettings, engine_arguments, environment
from verl_mg.rollout.sglang.process import HostProcess

START_SECONDS = 1800.0
CALL_SECONDS = 600.0
ABORT_SECONDS = 10.0
"""How long an aborted request may take to say how far it got."""


@dataclass
class _Running:
    """A request in the engine."""

    request: Request
    sampling: Sampling
    deadline: float
    timed_out: bool = False


class SGLangEngine(RolloutEngine):
    """One `sglang.Engine` in a process of its own, started by this rank.

    A request that takes longer than `request_timeout` seconds is cut alone and comes back with finish "timeout".
    When the process ends by itself, any method raises `EngineDiedError`; then `restart`, bring the weights, `resume`.
    Raises UserError with the end of the engine's log where it cannot start.
    """

    def __init__(self, model: Path, settings: EngineSettings, log: Path, request_timeout: float = 3600.0) -> None:
        self.settings, self._log, self._request_timeout = settings, log, request_timeout
        self._arguments = engine_arguments(model, settings)
        self._shape = _routed_shape(model) if settings.routed_experts else None
        self._running: dict[str, _Running] = {}
        self._done: deque[Sample] = deque()
        self._answers: dict[int, tuple[bool, str]] = {}
        self._numbers = itertools.count()
        self._version = -1
        self._process: HostProcess | None = None
        self.restart()

    # -- life

    def restart(self) -> None:
        """A new process, without weights; what was unfinished waits for `resume`."""
        self.close()
        self._process = HostProcess(self._arguments, environment(self.settings.layout), self._log)
        self._process.wait_until_ready(START_SECONDS)
        self._version = -1

    def resume(self) -> None:
        """Ask again for everything that was in flight when the process before ended."""
        for rid, running in self._running.items():
            self._ask(rid, running)

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

    def room(self) -> int:
        """See `RolloutEngine`."""
        return self.settings.max_running - len(self._running)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """See `RolloutEngine`. UserError for an empty prompt or one that leaves no room to answer."""
        for request in requests:
            self._check(request)
            running = _Running(request, sampling, time.monotonic() + self._request_timeout)
            if request.budget(sampling) <= 0:
                self._done.append(request.answer(Sample(request.id, (), (), (), "length")))
                continue
            rid = f"{request.id}.{next(self._numbers)}"
            self._running[rid] = running
            self._ask(rid, running)

    def collect(self, timeout: float) -> list[Sample]:
        """See `RolloutEngine`."""
        until = time.monotonic() + timeout
        self._drain(until)
        self._cut_the_late()
        samples = list(self._done)
        self._done.clear()
        return samples

    def abort(self) -> None:
        """See `RolloutEngine`."""
        self._host.send({"abort": None})

    def _check(self, request: Request) -> None:
        limit = self.settings.max_positions
        if not request.prompt:
            raise UserError(f"the prompt of request {request.id} is empty: give at least one token")
        if len(request.context) >= limit:
            raise UserError(
                f"request {request.id}: its {len(request.context)} tokens fill the {limit} positions of the model: "
                "shorten the prompt"
            )

    def _ask(self, rid: str, running: _Running) -> None:
        request, sampling = running.request, running.sampling
        context = request.context
        budget = min(request.budget(sampling), self.settings.max_positions - len(context))
        drawn: dict[str, Any] = {
            "max_new_tokens": budget,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": list(sampling.stop_token_ids),
            # SGLang ends at the model's own end of sequence too, unless it is to end nowhere.
            "ignore_eos": not sampling.stop_token_ids,
            "skip_special_tokens": False,
        }
        if self._arguments.get("enable_deterministic_inference"):
            drawn["sampling_seed"] = request.seed
        fields: dict[str, Any] = {"input_ids": list(context), "sampling_params": drawn}
        if self._shape is not None:
            fields["return_routed_experts"] = True
        self._host.send({"generate": rid, "fields": fields})

    def _drain(self, until: float) -> None:
        """Take messages until there is a sample to give, then those that are there already."""
        while True:
            try:
                message = self._host.inbox.get(timeout=0.0 if self._done else max(0.0, until - time.monotonic()))
            except queue.Empty:
                return
            self._take(message)

    def _take(self, message: dict[str, Any] | None) -> None:
        if message is None:
            self._version = -1
            raise self._host.died()
        if "call" in message:
            self._answers[message["call"]] = message["ok"], message["message"]
        elif (running := self._running.pop(message["sample"], None)) is not None:
            self._done.append(running.request.answer(self._sample(running, message)))

    def _sample(self, running: _Running, message: dict[str, Any]) -> Sample:
        request = running.request
        if "error" in message:
            if "abort" not in message["error"].lower():
                raise UserError(f"SGLang refuses request {request.id}: {message['error']}")
            return Sample(request.id, (), (), (), "timeout" if running.timed_out else "abort")
        tokens = tuple(message["tokens"])
        finish: Finish = message["finish"]
        if finish == "abort" and running.timed_out:
            finish = "timeout"
        versions = _versions(message["spans"], len(tokens), self._version)
        routed = self._routed(message["routed_experts"])
        return Sample(request.id, tokens, tuple(message["logprobs"]), versions, finish, routed)

    def _routed(self, text: str | None) -> Tensor | None:
        if text is None or self._shape is None:
            return None
        flat = np.frombuffer(base64.b64decode(text), dtype=np.int32)
        return torch.from_numpy(flat.astype(np.int16)).view(-1, *self._shape)

    def _cut_the_late(self) -> None:
        now = time.monotonic()
        for rid, running in list(self._running.items()):
            if now > running.deadline and not running.timed_out:
                running.timed_out, running.deadline = True, now + ABORT_SECONDS
                self._host.send({"abort": rid})
            elif now > running.deadline:
                # It does not even say how far it got.
                del self._running[rid]
                self._done.append(running.request.answer(Sample(running.request.id, (), (), (), "timeout")))

    # -- weights and memory

    def begin_update(self) -> None:
        """Open the weights for writing; nothing may be in flight."""
        self._wait(self._call("begin_weight_update"))

    def load(self, payloads: Sequence[str], version: int | None) -> int:
        """Begin to copy the tensors of the payloads, one a rank, into the parameters; a number for `loaded`.

        `version` comes with the last ones: the cache of the old weights is flushed with them.
        """
        return self._call(
            "update_weights_from_tensor",
            serialized_named_tensors=list(payloads),
            load_format="direct",
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
        self._wait(self._call("release_memory_occupation", tags=_tags(weights, kv)))
        if weights:
            self._version = -1

    def wake(self, *, weights: bool = True, kv: bool = True) -> None:
        """Take the memory again."""
        self._wait(self._call("resume_memory_occupation", tags=_tags(weights, kv)))

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
    def _host(self) -> HostProcess:
        if self._process is None:
            raise RuntimeError("the engine is closed")
        return self._process


def _tags(weights: bool, kv: bool) -> list[str]:
    return [tag for tag, wanted in (("kv_cache", kv), ("weights", weights)) if wanted]


def _versions(spans: Sequence[dict[str, Any]], count: int, version: int) -> tuple[int, ...]:
    """The version of each token, as SGLang tells it in runs."""
    versions = [version] * count
    for span in spans:
        versions[span["start"] : span["end"]] = [int(span["version"])] * (span["end"] - span["start"])
    return tuple(versions)


def _routed_shape(model: Path) -> tuple[int, int]:
    """(layers, experts of a token) of what SGLang tells of a token's routing."""
    from verl_mg.weights import read_config

    config = read_config(model)
    if config.experts is None:
        raise UserError(f"{model}: rollout.replay_routing needs a model with experts; set it to false")
    return config.layers, config.experts.top_k
