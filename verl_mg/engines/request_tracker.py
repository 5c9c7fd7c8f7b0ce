"""Requests in flight in an engine, whether it is a process of this job or a server.

    submit --> running --result--> done --collect--> caller
                 |  deadline: aborted; its partial sample has the finish "timeout"
                 |  ABORT_SECONDS later without a result: done, with the tokens that it was submitted with
                 +--engine lost--> `resume` sends it again under a new id

Results of ids that are no longer in flight are ignored.
"""

from __future__ import annotations

import base64
import itertools
import queue
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from verl_mg.engines.engine import Counts, Finish, Request, RolloutEngine, Sample, Sampling
from verl_mg.engines.reports import ReportRules
from verl_mg.engines.request_batch import SHARED, RequestBatch
from verl_mg.errors import UserError

ABORT_SECONDS = 10.0  # time limit of an aborted request for returning its partial sample


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Limits and properties of an engine."""

    max_running: int  # largest number of requests at the same time; 0: an engine says it when it has started
    max_positions: int  # largest number of tokens of a prompt with its response
    seeded: bool = False  # whether a sample depends only on its seed
    reads_text: bool = False  # whether it has a tokenizer, and can end a response at a string
    reports: ReportRules  # what is true of its samples
    request_timeout: float = 3600.0  # seconds after which a request is aborted, without the others


@dataclass
class _Running:
    """A request in the engine."""

    request: Request
    sampling: Sampling
    deadline: float  # time of `time.monotonic` at which it is aborted
    timed_out: bool = False  # whether it has been aborted for its deadline


class RequestTracker(RolloutEngine):
    """Keeps the requests in flight; subclasses implement the transport to the engine."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits, self._request_timeout = limits, limits.request_timeout
        self._running: dict[str, _Running] = {}
        self._done: deque[Sample] = deque()
        self._num_together = 0  # samples of the last `collect` that had any
        self._numbers = itertools.count()
        self._version = -1
        self._counts: Counter[str] = Counter()

    def take_counts(self) -> Counts:
        """Returns the counters of the requests that were completed since the last call."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def num_free_slots(self) -> int:
        """Returns the limit of running requests minus those in flight."""
        return self._limits.max_running - len(self._running)

    def num_queue_slots(self) -> int:
        """Returns a quarter of the running requests, or as many as were complete together: no step has a gap."""
        return max(self._limits.max_running // 4, self._num_together)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Sends requests to the engine; UserError for a prompt that is empty or fills the context."""
        deadline, new = time.monotonic() + self._request_timeout, []
        for request in {id(request.prompt): request for request in requests}.values():
            self._check_prompt(request)
        for request in requests:
            self._check_length(request)
            if request.remaining_tokens(sampling) > 0:
                new.append(_Running(request, sampling, deadline))
            else:
                self._done.append(request.prepend_partial(Sample(request.id, (), (), (), "length")))
        self._send(new)

    def collect(self, timeout: float) -> list[Sample]:
        """Returns completed samples, and aborts requests that exceed their time limit."""
        self._drain(time.monotonic() + timeout)
        self._abort_timed_out()
        samples = list(self._done)
        self._done.clear()
        if samples:
            self._num_together = min(len(samples), self._limits.max_running)
        return samples

    def abort_samples(self, ids: Collection[int]) -> None:
        """Aborts the requests of some samples."""
        for rid, running in list(self._running.items()):
            if running.request.id in ids:
                self._abort_request(rid)

    def in_flight(self) -> list[tuple[Request, Sampling]]:
        """Returns the requests in flight, with their sampling parameters."""
        return [(running.request, running.sampling) for running in self._running.values()]

    def take_unfinished(self) -> list[tuple[Request, Sampling]]:
        """Returns the requests in flight and forgets them; results that still arrive are ignored."""
        taken, self._running = self.in_flight(), {}
        return taken

    def resume(self) -> None:
        """Submits all requests again that were in flight when the engine was lost, with new ids."""
        unfinished, self._running = self._running, {}
        for _, of_one_call in groupby(unfinished.values(), key=lambda running: id(running.sampling)):
            self._send(list(of_one_call))

    @abstractmethod
    def _generate(self, batch: RequestBatch) -> None:
        """Sends requests."""

    @abstractmethod
    def _abort_request(self, rid: str) -> None:
        """Aborts a request; its partial result still arrives."""

    @abstractmethod
    def _receive(self, timeout: float) -> None:
        """Handles one message, a result by `_complete`; queue.Empty after `timeout` seconds without any."""

    def _complete(self, rid: str, result: dict[str, Any]) -> None:
        """Makes a sample from a result as of `EngineHost.generate`, or {"error": TEXT}; ignores unknown ids."""
        if (running := self._running.pop(rid, None)) is not None:
            for name, count in self._limits.reports.check_counts(result.get("counts", {})).items():
                self._counts[name] += count
            self._done.append(running.request.prepend_partial(self._sample(running, result)))

    def _check_length(self, request: Request) -> None:
        limit = self._limits.max_positions
        if len(request.context) >= limit:
            raise UserError(
                f"request {request.id}: its {len(request.context)} tokens fill the {limit} positions of the model. "
                "Shorten the prompt."
            )

    def _check_prompt(self, request: Request) -> None:
        if not request.prompt:
            raise UserError(f"request {request.id}: the prompt is empty. Give at least one token.")
        # A token beyond the vocabulary would end some engines.
        if (largest := max(request.prompt)) >= (vocab := self._limits.reports.vocab):
            raise UserError(
                f"request {request.id}: its token {largest} is not in the vocabulary of {vocab}. Use the tokenizer of "
                "the model."
            )

    def _send(self, batch: Sequence[_Running]) -> None:
        """Sends requests with the same sampling parameters in one message."""
        if not batch:
            return
        sampling, reports = batch[0].sampling, self._limits.reports
        shared = {name: getattr(sampling, name) for name in SHARED} | {
            "stop": sampling.stop if self._limits.reads_text else (),
            # Whether samples contain the experts of each token.
            "routed_experts": reports.experts is not None,
            # Whether samples contain the keys that each token attended to.
            "selected_keys": reports.indexer is not None,
            # Whether samples contain the candidates of each token.
            "returns_support": sampling.reports_support,
            "top_logprobs": min(sampling.top_logprobs, reports.vocab),
            "vocab": reports.vocab,
        }
        images = {image.key: image for running in batch for image in running.request.context_images}
        contexts: list[tuple[int, ...]] = []
        places: dict[int, int] = {}  # of contexts by identity: samples of a prompt have the same tuple
        items = []
        for running in batch:
            request = running.request
            context = request.context
            if id(context) not in places:
                places[id(context)] = len(contexts)
                contexts.append(context)
            # SGLang aborts every request whose id begins with the given one: the dot keeps sample 1 apart from sample
            # 12. The number keeps the results of a request apart from its repetitions.
            rid = f"{request.id}.{next(self._numbers)}"
            self._running[rid] = running
            items.append(
                {
                    "rid": rid,
                    "context": places[id(context)],
                    "max_new_tokens": min(
                        request.remaining_tokens(sampling), self._limits.max_positions - len(context)
                    ),
                    "seed": request.seed if self._limits.seeded else None,
                    "images": [image.key for image in request.context_images],
                }
            )
        encoded = {key: base64.b64encode(image.data).decode() for key, image in images.items()}
        self._generate(RequestBatch(shared, contexts, encoded, items))

    def _drain(self, deadline: float) -> None:
        """Handles messages until there is a sample, then those that have already arrived."""
        # Consumes messages; waits until the deadline for the first sample; ends when no message is left.
        while True:
            try:
                self._receive(0.0 if self._done else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return

    def _sample(self, running: _Running, result: dict[str, Any]) -> Sample:
        request, sampling = running.request, running.sampling
        if "error" in result:
            # An engine may report an abort of a request that it has not started as an error.
            if "abort" not in result["error"].lower():
                raise UserError(
                    f"{self._limits.reports.engine}: the engine rejects request {request.id} ({result['error']}). "
                    "Shorten it, or see the log of the engine."
                )
            return Sample(request.id, (), (), (), "timeout" if running.timed_out else "abort")
        tokens = tuple(result["tokens"])
        finish: Finish = result["finish"]
        if finish == "abort" and running.timed_out:
            finish = "timeout"
        # Tokens outside of all spans have the version of the last update.
        versions = _versions(result["spans"], len(tokens), self._version)
        rules, num_fed = self._limits.reports, len(request.context) + len(tokens) - 1
        is_complete = finish in ("stop", "length")
        routed = rules.read_experts(request.id, result["routed_experts"], num_fed, is_complete)
        keys = rules.read_keys(request.id, result.get("selected_keys"), num_fed, is_complete)
        support = rules.read_support(request.id, result["support"], tokens) if sampling.reports_support else None
        count = sampling.top_logprobs
        top = rules.read_top(request.id, result["top"], len(tokens), count) if count else None
        logprobs = tuple(result["logprobs"])
        sample = Sample(request.id, tokens, logprobs, versions, finish, routed, support, top, selected_keys=keys)
        return rules.check(request, sampling, sample, self._version)

    def _abort_timed_out(self) -> None:
        now = time.monotonic()
        for rid, running in list(self._running.items()):
            if now > running.deadline and not running.timed_out:
                running.timed_out, running.deadline = True, now + ABORT_SECONDS
                self._abort_request(rid)
            elif now > running.deadline:
                # The partial sample has not arrived either.
                del self._running[rid]
                self._done.append(running.request.prepend_partial(Sample(running.request.id, (), (), (), "timeout")))


def routed_shape(model: Path) -> tuple[int, int]:
    """Returns (layers, experts per token) of an engine's routing data; UserError for a model without experts."""
    from verl_mg.models.transformers_module import read_any_config

    config = read_any_config(model)
    if config.experts is None:
        raise UserError(f"rollout.replay_routing: {model} has no experts. Set it to false.")
    return config.layers, config.experts.top_k


def _versions(spans: Sequence[dict[str, Any]], count: int, version: int) -> tuple[int, ...]:
    """Returns the policy version of each token: `version`, except in an engine's spans.

    Four tokens, version 6, and a span {"start": 1, "end": 3, "version": "5"} give (6, 5, 5, 6).
    """
    versions = [version] * count
    for span in spans:
        versions[span["start"] : span["end"]] = [int(span["version"])] * (span["end"] - span["start"])
    return tuple(versions)
