"""Number of samples that an engine has in flight, by its measure of its cache (`rollout.max_running_requests=auto`).

Each observation of the engine's load is in one state:

    state    share of the cache in use          the limit
    GROW     below TARGET, and nothing waits    grows halfway to what would use TARGET, when the last change has settled
    HOLD     from TARGET on, or requests wait   stays
    SHRINK   both, or the cache was full        is what would use TARGET; once, until the others are complete

It begins with as many samples as fit at their greatest length, so that none is computed twice. The first samples are
young and use little: a change has settled when no more than LEFT of the samples that were in flight then are, and the
next step counts with the largest share of the cache that a sample has had since. After the first cut steps are small:
samples that begin together use most of the cache only at their end. The limit learns while it is in use, and not from
the last samples of a call.

    cache of 1000 tokens, samples of up to 100 tokens                                10
    9 of these 10 are complete, and a sample had 0.02 of the cache: 45 would fit     27
    24 of the 27 are complete, and a sample had 0.025: 36 would fit                  31
    28 use 0.93 and 3 wait: of samples like these 27 would fit                       27
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum

from verl_mg.engines.engine import (
    CAPACITY,
    FULL,
    GROWING,
    HOLDING,
    NEARLY,
    OBSERVED,
    RUNNING,
    SHRINKING,
    USED,
    WAITING,
)

TARGET = 0.9  # share of the cache that the limit is to use at most
LEFT = 0.1  # share of samples that may be left when a change has settled; of a heavy tail the last take much longer
LARGEST_STEP = 4.0  # largest factor of a step: the samples that it counts with are younger than later ones
SMALL_STEP = 1.1  # the same after a cut
IN_USE = 0.5  # share of the limit in flight from which it is what decides how many are
AT_ONCE = 1.0  # waiting requests, in the mean; fewer wait for the engine's next step and not for its cache


class LimitState(Enum):
    """State of an observation, as its name in counts; see the table above."""

    GROW = GROWING
    HOLD = HOLDING
    SHRINK = SHRINKING


class RequestLimit:
    """Largest number of samples in flight of one engine: `value`, which follows the observations of its load."""

    def __init__(self, cache_tokens: int, longest: int) -> None:
        self.value = max(1, cache_tokens // longest)  # `longest`: tokens of the longest sample with its prompt
        self._before: frozenset[int] | None = None  # samples in flight at the last change
        self._step = LARGEST_STEP
        self._share = 0.0  # largest share of the cache for a sample since then

    def observe(self, load: Mapping[str, float], in_flight: Collection[int]) -> LimitState | None:
        """Changes the limit by the counts of an engine since the last call; returns their state, None without any.

        `in_flight` are the samples whose load it was, those that are complete by now included.
        """
        if not load.get(OBSERVED) or not load.get(CAPACITY):
            return None
        used, waits = load[USED] / load[CAPACITY], load[WAITING] >= AT_ONCE * load[OBSERVED]
        if load.get(FULL):  # if only for a moment, which the mean does not show
            used = max(used, NEARLY)
        if used >= NEARLY or (waits and used >= TARGET):
            if len(in_flight) <= self.value:  # else an earlier cut has not reached the engine
                computed = len(in_flight) * load[RUNNING] / max(load[RUNNING] + load[WAITING], 1.0)
                self._step = SMALL_STEP
                self._change(min(self.value, int(computed * TARGET / used)), in_flight)
            return LimitState.SHRINK
        state = LimitState.HOLD if waits or used >= TARGET else LimitState.GROW
        if self._before is None:
            self._before = frozenset(in_flight)
        if len(in_flight) >= IN_USE * self.value:
            self._share = max(self._share, used / len(in_flight))
            num_left = len(self._before.intersection(in_flight))
            if state is LimitState.GROW and num_left <= LEFT * len(self._before):
                self._grow(in_flight)
        return state

    def _grow(self, in_flight: Collection[int]) -> None:
        largest = max(self._step * self.value, self.value + 1.0)
        fitting = TARGET / self._share if self._share else largest
        self._change(max(self.value, int(min((self.value + fitting) / 2, largest))), in_flight)

    def _change(self, value: int, in_flight: Collection[int]) -> None:
        self.value, self._before, self._share = max(1, value), frozenset(in_flight), 0.0
