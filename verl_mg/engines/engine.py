"""Interface of rollout engines: token ids in, token ids and their log-probabilities out.

Requests stream in and samples stream out:

    engine.submit(requests, sampling)      engine.num_free_slots() of them run immediately, the rest wait inside
    engine.collect(timeout)                samples completed since the last call, in any order
    engine.abort()                         stops running requests; collect returns them as partial samples

A sample that was aborted under version 4 of the weights and continued under version 5:

    Request(id=7, prompt=(11, 12), seed=3)
    Sample(id=7, tokens=(21, 22), logprobs=(-0.5, -1.0), policy_versions=(4, 4), finish="abort")
    Request(id=7, prompt=(11, 12), seed=3, partial=<that sample>)       its context: (11, 12, 21, 22)
    Sample(id=7, tokens=(21, 22, 23), logprobs=(-0.5, -1.0, -0.2), policy_versions=(4, 4, 5), finish="stop")
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from verl_mg.data.prompts import Prompt
from verl_mg.engines.fed_tokens import SelectedKeys, continued
from verl_mg.engines.sampled_support import SampledSupport, join_entries, join_tops
from verl_mg.engines.trajectory import NOT_GENERATED, Trajectory
from verl_mg.errors import UserError
from verl_mg.images import RowImages

if TYPE_CHECKING:
    from torch import Tensor

Finish = Literal["stop", "length", "abort", "timeout"]

# Counters of an engine: its load, tokens that it found in its cache, drafted tokens that it accepted.
# Tokens in front of the first new one, and how many of them had keys and values in the cache.
PROMPT, CACHED = "prompt tokens", "cached tokens"
# Tokens that speculative decoding proposed, and those that the policy accepted.
DRAFTED, ACCEPTED = "drafted tokens", "accepted tokens"
# Steps of the policy with drafted tokens, and the tokens that requests with such steps generated.
VERIFIED, GENERATED = "verifications", "generated tokens"

# Sums over observations of the load: requests that an engine computes, requests that wait; number of observations.
RUNNING, WAITING, OBSERVED = "running requests", "waiting requests", "observations"
# Sums over observations: tokens in the key-value cache, and its capacity in tokens.
USED, CAPACITY = "used cache tokens", "cache capacity tokens"
# Observations of a cache of which more than the share NEARLY is in use: the next tokens may not fit.
FULL, NEARLY = "observations of a full cache", 0.95
# Observations by which the limit of running requests was set (`rollout.request_limit`), sum of the limits then, and the
# observations in each state.
LIMITED, LIMIT = "limited observations", "request limits"
GROWING, HOLDING, SHRINKING = "growing observations", "holding observations", "shrinking observations"

Counts = Mapping[str, int]  # sums over requests and observations, by the names above


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters, the same for all requests of a call; UserError for a value outside its range."""

    max_new_tokens: int  # largest number of tokens in a response; at least 1
    temperature: float = 1.0  # divisor of the logits; 0 is greedy decoding
    top_p: float = 1.0
    """A token is a candidate if the tokens more probable than it have less than this share of the distribution after
    temperature scaling; 1: no limit."""
    top_k: int = 0  # number of the most probable tokens that are candidates; 0: no limit
    min_p: float = 0.0
    """A token is a candidate if its probability is at least this share of the highest one; 0: no limit."""
    stop_token_ids: tuple[int, ...] = ()  # tokens that end a response; they are part of it
    stop: tuple[str, ...] = ()
    """Strings that end a response: its last token is the one that completes one of them. An engine that reads text ends
    there early; `StopStringEngine` makes the end exact."""
    excluded_token_ids: tuple[int, ...] = ()
    """Tokens that are never drawn, such as placeholders of images, which make a context without the image invalid.
    Log-probs of `hf` are under the distribution with these tokens, of SGLang and vLLM without them."""
    returns_support: bool = False
    """Whether samples have the candidates of each token where top_k, top_p or min_p limit them; log-probs are then
    under the distribution that was drawn from, which has the candidates only."""
    top_logprobs: int = 0  # number of likeliest tokens that samples have for each token

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens: it is {self.max_new_tokens}. Give at least 1.")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature: it is {self.temperature}. Give 0 for greedy, or a positive number.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: it is {self.top_p}. Give a number above 0 and up to 1, where 1 turns it off.")
        if self.top_k < 0:
            raise UserError(f"top_k: it is {self.top_k}. Give a positive number, or 0 to turn it off.")
        if not 0 <= self.min_p < 1:
            raise UserError(f"min_p: it is {self.min_p}. Give a number below 1, or 0 to turn it off.")
        if isinstance(self.stop, str) or not all(self.stop):
            raise UserError(f"stop: it is {self.stop!r}. Give strings that are not empty.")
        if self.top_logprobs < 0:
            raise UserError(f"top_logprobs: it is {self.top_logprobs}. Give a positive number, or 0 to turn it off.")

    @property
    def reports_support(self) -> bool:
        """Whether samples have the candidates of each token: a greedy one has no choice, and without limits all are."""
        limited = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return self.returns_support and limited and self.temperature > 0


@dataclass(frozen=True)
class Request:
    """Request to generate one sample."""

    id: int  # sample id, unique among the requests in flight
    prompt: tuple[int, ...]
    seed: int  # source of the sample's randomness; the only one where the engine supports seeds per request
    partial: Sample | None = None  # tokens generated before the sample was aborted; the response begins with them
    origin: Prompt | None = None  # prompt of the data, for agents and tools, which need more than its tokens
    images: RowImages = ()
    """Images whose placeholders the prompt has, in their order; each has one placeholder for each feature."""

    @property
    def context(self) -> tuple[int, ...]:
        """Returns all tokens in front of the next one: the prompt and the partial sample."""
        return self.prompt + self.partial.tokens if self.partial else self.prompt

    @property
    def context_images(self) -> RowImages:
        """Returns the images of the prompt and of the partial sample."""
        return self.images + self.partial.images if self.partial else self.images

    def remaining_tokens(self, sampling: Sampling) -> int:
        """Returns how many tokens may still be generated."""
        return sampling.max_new_tokens - (len(self.partial.tokens) if self.partial else 0)

    def prepend_partial(self, continuation: Sample) -> Sample:
        """Returns the sample with the partial one, if there is one, in front of its continuation."""
        return self.partial.extended_by(continuation) if self.partial else continuation


@dataclass(frozen=True)
class Sample:
    """The response to a request: every token after the prompt."""

    id: int
    tokens: tuple[int, ...]  # token ids, a stop token included
    logprobs: tuple[float, ...]
    """Log-probability of each token, in nats, after temperature scaling (temperature 1 for greedy), under the full
    distribution or, with `support`, under that of the candidates, so that training can compute the same quantity; 0 for
    tokens that the policy did not generate."""
    policy_versions: tuple[int, ...]
    """Version of the weights that generated each token; NOT_GENERATED for observations of tools."""
    finish: Finish
    # Not compared: tensors compare by element.
    routed_experts: Tensor | None = field(default=None, compare=False)
    """Experts of every token from the first prompt token on, except the last token: int16, (tokens fed to the model,
    layers, top_k). None if the engine does not report them."""
    support: SampledSupport | None = field(default=None, compare=False)
    """Candidates of each token; log-probs are under the distribution over them. None without `reports_support`."""
    top: Tensor | None = field(default=None, compare=False)
    """Likeliest tokens in the place of each token, (tokens, 2, k) float32: their log-probs, under the distribution of
    `logprobs` in falling order, and ids; -inf and 0 where there are fewer. None without `Sampling.top_logprobs`."""
    trajectory: Trajectory | None = None
    """The work of an agent on the prompt; the sample itself has no tokens then. None without an agent."""
    images: RowImages = ()  # images of observations, whose placeholders are among the tokens, in their order
    selected_keys: SelectedKeys | None = field(default=None, compare=False)
    """Keys that the tokens of `routed_experts` attended to. None if the engine does not report them."""

    def extended_by(self, continuation: Sample) -> Sample:
        """Returns this sample followed by its continuation, whose finish reason and id are kept."""
        num_before, num_after = len(self.tokens), len(continuation.tokens)
        return replace(
            continuation,
            tokens=self.tokens + continuation.tokens,
            logprobs=self.logprobs + continuation.logprobs,
            policy_versions=self.policy_versions + continuation.policy_versions,
            routed_experts=continued(self.routed_experts, continuation.routed_experts),
            selected_keys=continued(self.selected_keys, continuation.selected_keys),
            support=join_entries([(num_before, self.support), (num_after, continuation.support)]),
            top=join_tops([(num_before, self.top), (num_after, continuation.top)]),
            images=self.images + continuation.images,
        )

    @property
    def generated_mask(self) -> tuple[bool, ...]:
        """Returns which tokens the policy generated."""
        return tuple(version != NOT_GENERATED for version in self.policy_versions)

    @property
    def generated_versions(self) -> list[int]:
        """Returns the version of the weights for each token that the policy generated, in all segments."""
        parts = self.trajectory.segments if self.trajectory else (self,)
        return [version for part in parts for version in part.policy_versions if version != NOT_GENERATED]


def observed_load(running: int, waiting: int, used: int, capacity: int) -> dict[str, int]:
    """Returns the counts of an observation of the load: numbers of requests, and of tokens in the cache."""
    full = int(used > NEARLY * capacity)
    return {RUNNING: running, WAITING: waiting, USED: used, CAPACITY: capacity, OBSERVED: 1, FULL: full}


def count_metrics(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the metrics of a call; {} for engines that count nothing.

    They begin with `time/`, since load and cache depend on the moments at which requests arrive. 30 running requests in
    10 observations of one engine and 10 in 10 of another give `time/engine_running` = 2.0.
    """
    total: dict[str, float] = {}
    for part in counts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    ratios = {
        "time/engine_running": (RUNNING, OBSERVED),
        "time/engine_waiting": (WAITING, OBSERVED),
        "time/engine_cache_usage": (USED, CAPACITY),
        "time/engine_limit": (LIMIT, LIMITED),
        "time/engine_growing": (GROWING, LIMITED),
        "time/engine_holding": (HOLDING, LIMITED),
        "time/engine_shrinking": (SHRINKING, LIMITED),
        "time/prompt_cache_hits": (CACHED, PROMPT),
        "time/draft_acceptance": (ACCEPTED, DRAFTED),
        "time/draft_tokens_per_step": (GENERATED, VERIFIED),
    }
    return {name: total.get(part, 0) / total[whole] for name, (part, whole) in ratios.items() if total.get(whole)}


class EngineDiedError(Exception):
    """The process of an engine ended unexpectedly, or a server is lost; the message contains the reason or a log."""


class RolloutEngine(ABC):
    """Generator of samples: one replica of the policy, or a wrapper around one."""

    continues_aborted = True  # whether a sample that was aborted continues after its tokens; otherwise it begins again

    @abstractmethod
    def num_free_slots(self) -> int:
        """Returns how many more requests would run immediately; with 0 or less further requests wait."""

    def num_queue_slots(self) -> int:
        """Returns how many requests may wait inside the engine, so that a slot is filled as soon as it is free."""
        return 0

    def num_cache_tokens(self) -> int:
        """Returns how many tokens the key-value cache has; 0 where the engine has no cache of a fixed size."""
        return 0

    @abstractmethod
    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Accepts requests, whose ids in flight are distinct; UserError for a prompt that is empty or too long."""

    @abstractmethod
    def collect(self, timeout: float) -> list[Sample]:
        """Returns the samples completed since the last call; waits up to `timeout` seconds for the first."""

    @abstractmethod
    def abort(self) -> None:
        """Aborts all requests in flight, from any thread; `collect` returns them with finish "abort"."""

    def abort_samples(self, ids: Collection[int]) -> None:  # noqa: B027, some engines run a batch to its end
        """Aborts some requests, where the engine can; `collect` returns them, with finish "abort" or complete."""

    @abstractmethod
    def health(self) -> bool:
        """Returns whether requests can be submitted now."""

    def take_counts(self) -> Counts:
        """Returns the engine's counters since the last call; {} where it counts nothing."""
        return {}

    def generate_on_each(self, request: Request, sampling: Sampling) -> list[Sample]:
        """Returns a sample of each engine that this one consists of, while no others are in flight."""
        return self.generate([request], sampling)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        """Returns one sample per request, in their order; blocks until all are done or `abort` is called."""
        self.submit(requests, sampling)
        samples: dict[int, Sample] = {}
        while len(samples) < len(requests):
            samples |= {sample.id: sample for sample in self.collect(timeout=1.0)}
        return [samples[request.id] for request in requests]


class EngineWrapper(RolloutEngine):
    """Base of engines that extend another one, which does what they do not override."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def num_free_slots(self) -> int:
        """Returns the free slots of the engine."""
        return self._engine.num_free_slots()

    def num_queue_slots(self) -> int:
        """Returns the queue slots of the engine."""
        return self._engine.num_queue_slots()

    def num_cache_tokens(self) -> int:
        """Returns the size of the engine's cache."""
        return self._engine.num_cache_tokens()

    def abort(self) -> None:
        """Aborts the engine's requests."""
        self._engine.abort()

    def abort_samples(self, ids: Collection[int]) -> None:
        """Aborts the engine's requests of some samples."""
        self._engine.abort_samples(ids)

    def health(self) -> bool:
        """Returns the health of the engine."""
        return self._engine.health()

    def take_counts(self) -> Counts:
        """Returns the counters of the engine."""
        return self._engine.take_counts()
