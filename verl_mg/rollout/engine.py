"""What a rollout engine promises: token ids in, token ids and their log-probabilities out.

Requests stream in and samples stream out:

    engine.submit(requests, sampling)      as many as engine.room() says run at once; more wait inside
    engine.collect(timeout)                the samples that are done since the last call, in any order
    engine.abort()                         what runs is cut; collect returns it as far as it got
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from verl_mg.errors import UserError

Finish = Literal["stop", "length", "abort", "timeout"]

NOT_GENERATED = -1
"""The version of tokens that no weights wrote."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn; one for all the requests of a call.

    A token may be drawn if it is among the `top_k` most probable (0: no limit) and the tokens more probable
    than it hold less than `top_p` of the temperature-scaled distribution. Temperature 0 is greedy.

    Raises UserError for a value outside its range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}: give at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}: give 0 for greedy, or a positive number")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: give a number above 0 and up to 1, where 1 turns it off")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}: give a positive number, or 0 to turn it off")


@dataclass(frozen=True)
class Request:
    """One sample to draw. Where the engine can, its randomness comes from `seed` alone.

    `begun`: what was written of the sample before it was cut; the answer begins with it.
    """

    id: int
    prompt: tuple[int, ...]
    seed: int
    begun: Sample | None = None

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens that stand before the next one."""
        return self.prompt + self.begun.tokens if self.begun else self.prompt

    def budget(self, sampling: Sampling) -> int:
        """How many tokens may still follow."""
        return sampling.max_new_tokens - (len(self.begun.tokens) if self.begun else 0)

    def answer(self, more: Sample) -> Sample:
        """`more` behind what had begun."""
        return self.begun.followed_by(more) if self.begun else more


@dataclass(frozen=True)
class Sample:
    """The answer to one request: everything behind the prompt.

    logprobs[t] is that of tokens[t], in nats, under the full distribution scaled by the temperature (by 1 for
    greedy): training can compute the same. versions[t] is that of the weights which wrote tokens[t]. Tokens that the
    policy did not write, the observations of tools, have log-prob 0 and version NOT_GENERATED. A stop token is
    included.
    routed_experts: int16 (tokens that were fed, layers, top_k), the experts that every token went to, from the
    prompt's first on, the last token excluded, where the engine tells; else None.
    """

    id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish
    routed_experts: Tensor | None = field(default=None, compare=False)

    def followed_by(self, more: Sample) -> Sample:
        """This, and `more` that was written behind it; `more` says how it ended."""
        routed, before = more.routed_experts, self.routed_experts
        if routed is None:  # nothing more was fed
            routed = before
        elif before is not None:
            # The tokens of before were written with the experts of before.
            routed = torch.cat([before, routed[len(before) :]])
        return replace(
            more,
            tokens=self.tokens + more.tokens,
            logprobs=self.logprobs + more.logprobs,
            versions=self.versions + more.versions,
            routed_experts=routed,
        )

    @property
    def written(self) -> tuple[bool, ...]:
        """Which tokens the policy wrote."""
        return tuple(version != NOT_GENERATED for version in self.versions)


class EngineDiedError(Exception):
    """The process of an engine ended by itself; the message says how."""


class RolloutEngine(ABC):
    """Something that writes samples: one replica of the policy, or a wrapper around one."""

    @abstractmethod
    def room(self) -> int:
        """How many more requests would be worked on at once; 0 or less: they would wait."""

    def ahead(self) -> int:
        """How many may wait inside beyond that, so that the engine need not wait for them when there is room."""
        return 0

    @abstractmethod
    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Take requests on; ids in flight differ. UserError for a prompt that the model cannot take."""

    @abstractmethod
    def collect(self, timeout: float) -> list[Sample]:
        """The samples done since the last call; waits up to `timeout` seconds for the first."""

    @abstractmethod
    def abort(self) -> None:
        """Cut all requests in flight, from any thread; `collect` returns them with finish "abort"."""

    @abstractmethod
    def health(self) -> bool:
        """Whether requests can be submitted now."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        """One sample a request, in their order; blocks until all are done or `abort` is called."""
        self.submit(requests, sampling)
        samples: dict[int, Sample] = {}
        while len(samples) < len(requests):
            samples |= {sample.id: sample for sample in self.collect(timeout=1.0)}
        return [samples[request.id] for request in requests]
