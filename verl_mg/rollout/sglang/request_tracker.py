"""Requests as SGLang takes them and its answers as samples: what an engine of this job and a server have in common."""

from __future__ import annotations

import base64
import itertools
import queue
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_mg.errors import UserError
from verl_mg.rollout.engine import Finish, Request, RolloutEngine, Sample, Sampling

ABORT_SECONDS = 10.0
"""How long an aborted request may take to say how far it got."""


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What an SGLang can take: requests at once, and tokens of a sample with its prompt.

    seeded: whether a sample's randomness comes from its seed alone. routed: (layers, experts of a token), where the
    experts that tokens went to are asked for.
    """

    max_running: int
    max_positions: int
    seeded: bool = False
    routed: tuple[int, int] | None = None


@dataclass
class _Running:
    """A request in the engine."""

    request: Request
    sampling: Sampling
    deadline: float
    timed_out: bool = False


class RequestTracker(RolloutEngine):
    """Keeps what is in flight; how it reaches SGLang and comes back is for those who inherit.

    A request that takes longer than `request_timeout` seconds is cut alone and comes back with finish "timeout".
    """

    def __init__(self, limits: EngineLimits, request_timeout: float) -> None:
        self._limits, self._request_timeout = limits, request_timeout
        self._running: dict[str, _Running] = {}
        self._done: deque[Sample] = deque()
        self._numbers = itertools.count()
        self._version = -1

    def num_free_slots(self) -> int:
        """See `RolloutEngine`."""
        return self._limits.max_running - len(self._running)

    def num_queue_slots(self) -> int:
        """See `RolloutEngine`. What is handed over and tokenised by then fills a batch without a gap."""
        return self._limits.max_running // 4

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """See `RolloutEngine`. UserError for an empty prompt or one that leaves no room to answer."""
        for request in requests:
            self._check(request)
            if request.remaining_tokens(sampling) <= 0:
                self._done.append(request.prepend_partial(Sample(request.id, (), (), (), "length")))
                continue
            self._ask(_Running(request, sampling, time.monotonic() + self._request_timeout))

    def collect(self, timeout: float) -> list[Sample]:
        """See `RolloutEngine`."""
        self._drain(time.monotonic() + timeout)
        self._cut_the_late()
        samples = list(self._done)
        self._done.clear()
        return samples

    def resume(self) -> None:
        """Ask again for everything that was in flight when SGLang died, under new names."""
        unfinished, self._running = self._running, {}
        for running in unfinished.values():
            self._ask(running)

    @abstractmethod
    def _generate(self, rid: str, fields: dict[str, Any]) -> None:
        """Send a request that is called `rid`; no `rid` is the beginning of another one's."""

    @abstractmethod
    def _cut(self, rid: str) -> None:
        """Have a request end as far as it got; its answer still comes."""

    @abstractmethod
    def _receive(self, timeout: float) -> None:
        """Take one message, an answer to `_answered`; queue.Empty after `timeout` seconds without."""

    def _answered(self, rid: str, answer: dict[str, Any]) -> None:
        """Make a sample of what `parse_response` tells, or of {"error": TEXT}; nothing if nobody waits for it any
        more."""
        if (running := self._running.pop(rid, None)) is not None:
            self._done.append(running.request.prepend_partial(self._sample(running, answer)))

    def _check(self, request: Request) -> None:
        limit = self._limits.max_positions
        if not request.prompt:
            raise UserError(f"the prompt of request {request.id} is empty: give at least one token")
        if len(request.context) >= limit:
            raise UserError(
                f"request {request.id}: its {len(request.context)} tokens fill the {limit} positions of the model: "
                "shorten the prompt"
            )

    def _ask(self, running: _Running) -> None:
        request, sampling = running.request, running.sampling
        context = request.context
        drawn: dict[str, Any] = {
            "max_new_tokens": min(request.remaining_tokens(sampling), self._limits.max_positions - len(context)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": list(sampling.stop_token_ids),
            # SGLang ends at the model's own end of sequence too, unless it is to end nowhere.
            "ignore_eos": not sampling.stop_token_ids,
            "skip_special_tokens": False,
        }
        if self._limits.seeded:
            drawn["sampling_seed"] = request.seed
        fields: dict[str, Any] = {"input_ids": list(context), "sampling_params": drawn, "return_logprob": True}
        if self._limits.routed is not None:
            fields["return_routed_experts"] = True
        rid = f"{request.id}.{next(self._numbers)}"
        self._running[rid] = running
        self._generate(rid, fields)

    def _drain(self, until: float) -> None:
        """Take messages until there is a sample to give, then those that are there already."""
        while True:
            try:
                self._receive(0.0 if self._done else max(0.0, until - time.monotonic()))
            except queue.Empty:
                return

    def _sample(self, running: _Running, answer: dict[str, Any]) -> Sample:
        request = running.request
        if "error" in answer:
            if "abort" not in answer["error"].lower():
                raise UserError(f"SGLang refuses request {request.id}: {answer['error']}")
            return Sample(request.id, (), (), (), "timeout" if running.timed_out else "abort")
        tokens = tuple(answer["tokens"])
        finish: Finish = answer["finish"]
        if finish == "abort" and running.timed_out:
            finish = "timeout"
        versions = _versions(answer["spans"], len(tokens), self._version)
        routed = self._routed(answer["routed_experts"])
        return Sample(request.id, tokens, tuple(answer["logprobs"]), versions, finish, routed)

    def _routed(self, text: str | None) -> Tensor | None:
        if text is None or self._limits.routed is None:
            return None
        flat = np.frombuffer(base64.b64decode(text), dtype=np.int32)
        return torch.from_numpy(flat.astype(np.int16)).view(-1, *self._limits.routed)

    def _cut_the_late(self) -> None:
        now = time.monotonic()
        for rid, running in list(self._running.items()):
            if now > running.deadline and not running.timed_out:
                running.timed_out, running.deadline = True, now + ABORT_SECONDS
                self._cut(rid)
            elif now > running.deadline:
                # It does not even say how far it got.
                del self._running[rid]
                self._done.append(running.request.prepend_partial(Sample(running.request.id, (), (), (), "timeout")))


def parse_response(found: dict[str, Any]) -> dict[str, Any]:
    """What a sample needs of SGLang's answer to a request."""
    meta = found["meta_info"]
    return {
        "tokens": found["output_ids"],
        "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
        "finish": meta["finish_reason"]["type"],
        "spans": meta.get("weight_versions") or [],
        "routed_experts": meta.get("routed_experts"),
    }


def routed_shape(model: Path) -> tuple[int, int]:
    """(layers, experts of a token) of what SGLang tells of a token's routing. UserError for a model without experts."""
    from verl_mg.models.hf_config import read_config

    config = read_config(model)
    if config.experts is None:
        raise UserError(f"{model}: rollout.replay_routing needs a model with experts; set it to false")
    return config.layers, config.experts.top_k


def _versions(spans: Sequence[dict[str, Any]], count: int, version: int) -> tuple[int, ...]:
    """The version of each token, as SGLang tells it in runs."""
    versions = [version] * count
    for span in spans:
        versions[span["start"] : span["end"]] = [int(span["version"])] * (span["end"] - span["start"])
    return tuple(versions)
