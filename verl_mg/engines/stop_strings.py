"""Stop strings: a response ends with the token that completes one of them, the same on every engine.

An engine that reads text ends generation early by its own rules; engines differ in how many of the last tokens they
decode, and how. Where a response ends is decided only here, by the text of all tokens of a turn. The tokens
"a", "b\\n", "\\nc", "d" with the stop string "\\n\\n" end with the third one, which stays whole.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from verl_mg.engines.engine import EngineWrapper, Request, RolloutEngine, Sample, Sampling
from verl_mg.engines.fed_tokens import without_last
from verl_mg.engines.trajectory import NOT_GENERATED
from verl_mg.models.special_tokens import exact_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[Sequence[int]], str]  # function that returns the text of tokens, special ones included


def decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Returns the function that decodes with a copy of a tokenizer, which is not safe to use in two threads."""
    return partial(exact_text, copy.deepcopy(tokenizer))


def num_tokens_to_stop(tokens: Sequence[int], stop: Sequence[str], decode: Decode) -> int | None:
    """Returns how many tokens there are up to the one that completes a stop string; None where none occurs."""

    def contains(count: int) -> bool:
        text = decode(tokens[:count])
        return any(string in text for string in stop)

    if not stop or not contains(len(tokens)):
        return None
    # Bisection, since a text that contains a string contains it with further tokens too.
    low, high = 1, len(tokens)  # the text of the first `high` tokens contains one
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if contains(middle) else (middle + 1, high)
    return high


def last_turn_start(sample: Sample) -> int:
    """Returns the number of tokens of a sample up to the last one that the policy did not generate."""
    start = len(sample.tokens)
    while start and sample.policy_versions[start - 1] != NOT_GENERATED:
        start -= 1
    return start


def cut_at_stop(sample: Sample, sampling: Sampling, decode: Decode) -> Sample | None:
    """Returns the sample up to the token that completes a stop string in its last turn; None where none occurs.

    The stop token that ended the sample is not part of the text: "<|im_end|>" contains "|", which a response does not.
    """
    start = last_turn_start(sample)
    ended = sample.finish == "stop" and sample.tokens[-1:] and sample.tokens[-1] in sampling.stop_token_ids
    written = sample.tokens[start : len(sample.tokens) - bool(ended)]
    count = num_tokens_to_stop(written, sampling.stop, decode)
    if count is None:
        return None
    # Reports of fed tokens have one entry less, so as many are removed as tokens.
    length = start + count
    removed = len(sample.tokens) - length
    return replace(
        sample,
        tokens=sample.tokens[:length],
        logprobs=sample.logprobs[:length],
        policy_versions=sample.policy_versions[:length],
        finish="stop",
        routed_experts=without_last(sample.routed_experts, removed),
        selected_keys=without_last(sample.selected_keys, removed),
        support=sample.support and sample.support.part(0, length),
        top=None if sample.top is None else sample.top[:length],
    )


class StopStringEngine(EngineWrapper):
    """Wrapper around an engine whose samples end at stop strings.

    A string may begin before an interruption of its sample. A sample that the engine has ended at a string which is not
    in the text of all its tokens is continued.
    """

    def __init__(self, engine: RolloutEngine, decode: Decode) -> None:
        super().__init__(engine)
        self._decode = decode
        self._requests: dict[int, tuple[Request, Sampling]] = {}
        self._aborted: set[int] = set()
        self._done: list[Sample] = []
        # `abort` may come from another thread, between any two steps of `collect`.
        self._lock = threading.RLock()

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Submits requests to the engine, except those whose partial samples end with a stop string already."""
        with self._lock:
            new = []
            for request in requests:
                ended = cut_at_stop(request.partial, sampling, self._decode) if request.partial else None
                if ended:
                    self._done.append(replace(ended, id=request.id))
                else:
                    new.append(request)
            self._engine.submit(new, sampling)
            self._requests |= {request.id: (request, sampling) for request in new}

    def collect(self, timeout: float) -> list[Sample]:
        """Returns the samples of the engine, each up to its stop string."""
        samples = self._engine.collect(0.0 if self._done else timeout)  # without the lock: `abort` must not wait for it
        with self._lock:
            for sample in samples:
                self._process(sample)
            done, self._done = self._done, []
            return done

    def abort(self) -> None:
        """Aborts the engine's requests."""
        with self._lock:
            self._aborted |= self._requests.keys()
            self._engine.abort()

    def abort_samples(self, ids: Collection[int]) -> None:
        """Aborts the engine's requests of some samples."""
        with self._lock:
            self._aborted |= self._requests.keys() & set(ids)
            self._engine.abort_samples(ids)

    def _process(self, sample: Sample) -> None:
        request, sampling = self._requests.pop(sample.id)
        cut = cut_at_stop(sample, sampling, self._decode)
        ended = sample.finish != "stop" or sample.tokens[-1] in sampling.stop_token_ids
        if cut or ended or not sampling.stop:
            self._done.append(cut or sample)
        elif sample.id in self._aborted:
            self._done.append(replace(sample, finish="abort"))
        else:
            # The engine saw a string that is not in the whole text: continue, and let only the text decide from now on.
            self._requests[sample.id] = (replace(request, partial=sample), sampling)
            self._engine.submit([self._requests[sample.id][0]], replace(sampling, stop=()))
            return
        self._aborted.discard(sample.id)
