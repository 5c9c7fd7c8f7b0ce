"""Requests of an engine that outlives its rank: the next rank repeats them, and is answered from what exists.

A rank that resumes from a checkpoint sends the requests of the repeated iterations again. One with the same sample, the
same content and the same version of the weights is the earlier one, whether its result exists or is being generated.
Weights of versions after the checkpoint are the same ones only in a deterministic job; in others their results are
dropped.

    add --> in flight --"stop", "length"--> kept --hand_over--> can be taken once by each further rank --+
                |                             |                        ^                                 | hand_over
                | aborted, failed,            | MAX_BYTES of newer     +---------------------------------+
                | other weights               | results
                +--------> dropped <----------+

A rank sends a request twice, with the results r1 and r2, and is lost. The next rank gets r1 for the first repetition,
r2 for the second, and a new result r3 for the third; the rank after it gets r1, r2 and r3.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import deque
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 2**28  # largest size of all results; the oldest are dropped first
TOKEN_BYTES = 80  # size of a token with its log-prob as Python's objects


@dataclass
class Generation:
    """A request that the engine has received, and its result."""

    rid: str  # id of the request in the engine
    key: str  # result of `request_key`
    version: int  # policy version of the engine's weights at its start; -1: they were being updated
    task: asyncio.Task[dict[str, Any]]  # generates the result
    can_answer: bool = True  # whether the next rank may have the result
    num_bytes: int = 0


class RequestLedger:
    """The requests since the engine started, as far as their results fit."""

    def __init__(self) -> None:
        self._generations: dict[int, Generation] = {}  # by identity, the last used last
        self._repeatable: dict[str, deque[Generation]] = {}
        self._num_bytes = 0

    def add(self, generation: Generation) -> None:
        """Adds a request that was sent to the engine."""
        self._generations[id(generation)] = generation
        generation.task.add_done_callback(lambda task: self._count(generation))

    def take(self, key: str) -> Generation | None:
        """Returns the earliest request of former ranks with this key, which no other request gets; None without one."""
        waiting = self._repeatable.get(key, ())
        while waiting:
            generation = waiting.popleft()
            if generation.can_answer:
                # Last in the order of use: the oldest are dropped first, and the next rank repeats in this order.
                self._generations[id(generation)] = self._generations.pop(id(generation))
                return generation
        return None

    def hand_over(self) -> None:
        """Makes the results so far available to the next rank, in the order in which they were used."""
        self._generations = {number: kept for number, kept in self._generations.items() if kept.can_answer}
        self._num_bytes = sum(generation.num_bytes for generation in self._generations.values())
        self._repeatable = {}
        for generation in self._generations.values():
            self._repeatable.setdefault(generation.key, deque()).append(generation)

    def drop_newer(self, version: int) -> None:
        """Drops requests of former ranks under newer weights than `version`: the next rank trains others."""
        for generation in self._generations.values():
            generation.can_answer = generation.can_answer and generation.version <= version

    def orphans(self) -> list[Generation]:
        """Returns the unfinished requests of former ranks that no rank has repeated."""
        return [g for waiting in self._repeatable.values() for g in waiting if not g.task.done()]

    def drop_unfinished(self) -> None:
        """Drops requests in flight: their further tokens are from other weights."""
        for generation in self._generations.values():
            generation.can_answer = generation.can_answer and generation.task.done()

    def _count(self, generation: Generation) -> None:
        task = generation.task
        if not generation.can_answer:
            return
        # An aborted result would be repeated as one that was complete.
        if task.cancelled() or task.exception() or task.result().get("finish") not in ("stop", "length"):
            generation.can_answer = False
            return
        generation.num_bytes = _size(task.result())
        self._num_bytes += generation.num_bytes
        while self._num_bytes > MAX_BYTES:
            oldest = self._generations.pop(next(iter(self._generations)))
            oldest.can_answer = False
            self._num_bytes -= oldest.num_bytes


def request_key(rid: str, request: dict[str, Any], version: int) -> str:
    """Returns what a repeated request has in common with the first one."""
    # rid is SAMPLE.NUMBER, and numbers differ between ranks.
    text = json.dumps([rid.partition(".")[0], version, request], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _size(result: dict[str, Any]) -> int:
    return TOKEN_BYTES * len(result["tokens"]) + len(result.get("routed_experts") or "")
