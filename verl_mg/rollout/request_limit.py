"""How many samples an engine has in flight, by its own measure of its cache (`rollout.max_running_requests=auto`).

Each observation of the engine's load is in one state:

    state    share of the cache in use          the limit
    GROW     below ENOUGH, and nothing waits    grows halfway to what would use TARGET, when the last change has settled
    HOLD     from ENOUGH on, or requests wait   stays
    SHRINK   both, or from FULL on              is what would use TARGET; once, until the others are complete

It begins with as many samples as fit at their greatest length, so that none is computed twice. The first samples are
young and use little: a change has settled when MOST of the samples that were in flight at the time are complete, and
the next step counts with the mean share of the cache that a sample has had since. The limit learns while it is in use,
and not from the last samples of a call.

    cache of 1000 tokens, samples of up to 100 tokens                                          10
    9 of these 10 are complete, and a sample had 0.02 of the cache in the mean: 42 would fit   26
    23 of the 26 are complete, and a sample had 0.025: 34 would fit                            30
    28 use 0.93 and 2 wait: of samples like these 25 would fit                                 25
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum

from verl_mg.engines.engine import (
    CAPACITY,
    GROWING,
    HOLDING,
    OBSERVED,
    RUNNING,
    SHRINKING,
    USED,
    WAITING,
)

TARGET = 0.85  # share of the cache that the limit is to use
ENOUGH = 0.9  # share from which it does not grow: above TARGET, so that it stays where lengths only vary
FULL = 0.95  # share from which the next tokens may not fit
MOST = 0.9  # share of samples that are complete when a change has settled; of a heavy tail the last take much longer
LARGEST_STEP = 4  # largest factor of a step: the samples that it counts with are younger than later ones
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
        self._used = self._samples = 0.0  # sums of the share in use and of the samples in flight since then

    def observe(self, load: Mapping[str, float], in_flight: Collection[int]) -> LimitState | None:
        """Changes the limit by the counts of an engine since the last call; returns their state, None without any.

        `in_flight` are the samples whose load it was, those that are complete by now included.
        """
        if not load.get(OBSERVED) or not load.get(CAPACITY):
            return None
        used, waits = load[USED] / load[CAPACITY], load[WAITING] >= AT_ONCE * load[OBSERVED]
        if used >= FULL or (waits and used >= ENOUGH):
            if len(in_flight) <= self.value:  # else an earlier cut has not reached the engine
                computed = len(in_flight) * load[RUNNING] / max(load[RUNNING] + load[WAITING], 1.0)
                self._change(min(self.value, int(computed * TARGET / used)), in_flight)
            return LimitState.SHRINK
        state = LimitState.HOLD if waits or used >= ENOUGH else LimitState.GROW
        if self._before is None:
            self._before = frozenset(in_flight)
        if len(in_flight) >= IN_USE * self.value:
            self._used += used * load[OBSERVED]
            self._samples += len(in_flight) * load[OBSERVED]
            num_left = len(self._before.intersection(in_flight))
            if state is LimitState.GROW and num_left <= (1 - MOST) * len(self._before):
                self._grow(in_flight)
        return state

    def _grow(self, in_flight: Collection[int]) -> None:
        largest = LARGEST_STEP * self.value
        fitting = TARGET * self._samples / self._used if self._used else largest
        self._change(max(self.value, min(int((self.value + fitting) / 2), largest)), in_flight)

    def _change(self, value: int, in_flight: Collection[int]) -> None:
        self.value, self._before = max(1, value), frozenset(in_flight)
        self._used = self._samples = 0.0
