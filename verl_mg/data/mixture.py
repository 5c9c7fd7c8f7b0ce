"""Mixture of several sets of prompts by weight.

Weights a 3, b 1:   a a b a | a a b a | ...   of n prompts 3 n / 4 come from a, within one prompt
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import chain
from math import lcm
from typing import Any

from verl_mg.data.prompts import Prompt, PromptSet, check_state


class Mixture:
    """Sets by name, each with its share of the prompts and its separately shuffled epochs."""

    def __init__(self, sets: Mapping[str, PromptSet], weights: Mapping[str, float]) -> None:
        """Starts at the first epoch of every set; weights are above 0, and no prompt id is in two sets."""
        self._sets = dict(sets)
        self._given = [[name, float(weights[name])] for name in self._sets]
        # As integers made from the decimal digits: 0.1 and 0.2 are then exactly 1 to 2, however long the run.
        exact = {name: Fraction(str(weight)) for name, weight in self._given}
        scale = lcm(*(weight.denominator for weight in exact.values()))
        self._weights = {name: int(weight * scale) for name, weight in exact.items()}
        self._taken = dict.fromkeys(self._sets, 0)
        self._by_id = {prompt.id: prompt for prompt in self}
        assert len(self._by_id) == len(self), "two sources share a prompt id"

    @property
    def dropped(self) -> int:
        """Number of prompts of all sources left out for their length."""
        return sum(prompts.dropped for prompts in self._sets.values())

    def __len__(self) -> int:
        return sum(map(len, self._sets.values()))

    def __iter__(self) -> Iterator[Prompt]:
        return chain.from_iterable(self._sets.values())

    def first(self, n: int) -> list[Prompt]:
        """Returns the first `n` prompts of each source, in file order."""
        return [prompt for prompts in self._sets.values() for prompt in prompts.first(n)]

    def by_id(self, prompt_id: int) -> Prompt:
        """Returns the prompt with that `id`. Raises KeyError if there is none or it was dropped."""
        return self._by_id[prompt_id]

    def take(self, n: int, draw: Callable[[PromptSet, int], list[Prompt]] = PromptSet.take) -> list[Prompt]:
        """Returns the next `n` prompts, sources interleaved."""
        order = [self._next_source() for _ in range(n)]
        drawn = {name: iter(draw(self._sets[name], count)) for name, count in Counter(order).items()}
        return [next(drawn[name]) for name in order]

    def state(self) -> dict[str, Any]:
        """Returns the position in every source as JSON, for `load_state` with the same sources and weights."""
        sources = {name: prompts.state() for name, prompts in self._sets.items()}
        return self._identity() | {"taken": dict(self._taken), "sources": sources}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes every source from a `state()`; UserError for one of other sources, weights or seed."""
        check_state(state, self._identity())
        for name, prompts in self._sets.items():
            prompts.load_state(state["sources"][name])
        self._taken = dict(state["taken"])

    def _identity(self) -> dict[str, Any]:
        return {"kind": "mixture", "weights": self._given}

    def _next_source(self) -> str:
        turn, total = sum(self._taken.values()) + 1, sum(self._weights.values())
        # The source that misses most of its share, of equals the first: none is ever a whole prompt ahead, and every
        # iteration has the configured mixture, which random sampling has only on average.
        name = max(self._sets, key=lambda name: self._weights[name] * turn - total * self._taken[name])
        self._taken[name] += 1
        return name
