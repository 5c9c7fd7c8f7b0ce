"""Prompts as a recipe and its rollout draw them: a buffer of early ones, and a selection by pass rate.

The selection skips prompts that are too easy or too hard. Band 0.2 to 0.8, `decay` 0.5: a prompt whose 8 answers all
pass has the rate 1.0 and is skipped `revisit` times; taken again with 2 of 8 right, it has 1.0 + 0.5 (0.25 - 1.0) =
0.625 and is inside the band.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_mg.data.prompts import Mixture, Prompt, PromptSet, check_state


class _Around:
    """Lookups in the prompts that a curriculum or a feed draws from."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts

    @property
    def dropped(self) -> int:
        """Number of prompts left out for their length."""
        return self._prompts.dropped

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the records, by the name of the source."""
        return self._prompts.digests

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def first(self, n: int) -> list[Prompt]:
        """Returns the first `n` prompts of each source, in file order."""
        return self._prompts.first(n)

    def by_id(self, prompt_id: int) -> Prompt:
        """Returns the prompt with that `id`. Raises KeyError if there is none or it was dropped."""
        return self._prompts.by_id(prompt_id)


class Curriculum(_Around):
    """Set or mixture of prompts that skips prompts with a pass rate outside a band, `revisit` times in a row.

    A prompt without observations is always taken. A mixture keeps its shares: a skipped prompt is replaced by the next
    one of the same source.
    """

    # A group whose answers all pass or all fail has no group-relative advantage.

    _prompts: PromptSet | Mixture

    def __init__(
        self,
        prompts: PromptSet | Mixture,
        *,
        low: float,
        high: float,
        revisit: int = 3,
        pass_threshold: float = 0.5,
        decay: float = 0.5,
    ) -> None:
        """Starts without observations."""
        super().__init__(prompts)
        self._low, self._high, self._revisit = low, high, revisit
        self._pass_threshold, self._decay = pass_threshold, decay
        self._rates: dict[int, float] = {}
        self._skips: dict[int, int] = {}

    def observe(self, prompt_ids: Sequence[int], rewards: Sequence[float]) -> None:
        """Updates the pass rates. The answers to a prompt within a call are one observation, their mean.

        Args:
            prompt_ids, rewards: prompt and reward of each sample.
        """
        passes: dict[int, list[bool]] = {}
        for prompt_id, reward in zip(prompt_ids, rewards, strict=True):
            passes.setdefault(int(prompt_id), []).append(float(reward) >= self._pass_threshold)
        for prompt_id, passed in passes.items():
            now = sum(passed) / len(passed)
            before = self._rates.get(prompt_id, now)
            self._rates[prompt_id] = before + (1 - self._decay) * (now - before)

    def take(self, n: int) -> list[Prompt]:
        """Returns the next `n` prompts; the skipped ones nearest to the band if a pass over a set finds too few."""
        return self._prompts.take(n, self._draw) if isinstance(self._prompts, Mixture) else self._draw(self._prompts, n)

    def metrics(self) -> dict[str, float]:
        """Returns the fraction of observed prompts; of these, the fraction inside the band and the mean rate."""
        known = list(self._rates)
        if not known:
            return {"curriculum/frac_observed": 0.0}
        return {
            "curriculum/frac_observed": len(known) / len(self),
            "curriculum/frac_in_band": sum(self._distance(i) == 0 for i in known) / len(known),
            # Sorted: the order of observations, and with it the rounding, is another one after a resume.
            "curriculum/pass_rate": sum(sorted(self._rates.values())) / len(known),
        }

    def state(self) -> dict[str, Any]:
        """Returns position and observations as JSON, for `load_state` with the same data."""
        return {
            "kind": "curriculum",
            "walk": self._prompts.state(),
            "rates": {str(i): self._rates[i] for i in sorted(self._rates)},
            "skips": {str(i): self._skips[i] for i in sorted(self._skips)},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from a `state()`, UserError for one of other data; band, threshold and decay may be new."""
        check_state(state, {"kind": "curriculum"})
        self._prompts.load_state(state["walk"])
        self._rates = {int(i): rate for i, rate in state["rates"].items()}
        self._skips = {int(i): count for i, count in state["skips"].items()}

    def _draw(self, prompts: PromptSet, n: int) -> list[Prompt]:
        taken: list[Prompt] = []
        # Ends: each pass returns at least one prompt, the nearest to the band if none is due.
        while len(taken) < n:
            taken += self._one_pass(prompts, n - len(taken))
        return taken

    def _one_pass(self, prompts: PromptSet, n: int) -> list[Prompt]:
        taken: list[Prompt] = []
        skipped: dict[int, Prompt] = {}
        for _ in range(len(prompts)):
            (prompt,) = prompts.take(1)
            if self._is_due(prompt.id):
                taken.append(prompt)
                self._skips.pop(prompt.id, None)
            else:
                skipped[prompt.id] = prompt
                self._skips[prompt.id] = self._skips.get(prompt.id, 0) + 1
            if len(taken) == n:
                return taken
        # A pass that starts within an epoch meets some prompts twice.
        left = [skipped[i] for i in skipped.keys() - {prompt.id for prompt in taken}]
        nearest = sorted(left, key=lambda prompt: (self._distance(prompt.id), prompt.id))[: n - len(taken)]
        for prompt in nearest:
            del self._skips[prompt.id]
        return taken + nearest

    def _is_due(self, prompt_id: int) -> bool:
        # Skipped so often it is taken once, since the policy has changed.
        return self._distance(prompt_id) == 0 or self._skips.get(prompt_id, 0) >= self._revisit

    def _distance(self, prompt_id: int) -> float:
        """Returns how far a prompt's rate is outside the band; 0 inside and without observations."""
        rate = self._rates.get(prompt_id)
        return 0.0 if rate is None else max(self._low - rate, rate - self._high, 0.0)


Prompts = PromptSet | Mixture | Curriculum
"""Endless sequences of prompts."""


class PromptFeed(_Around):
    """Draws prompts in the order of the underlying `Prompts`, each of them once.

        feed.next_batch(n)      the next n prompts for the recipe
        feed.peek(n)            the prompts that the next `next_batch(n)` returns
        feed.draw_extra(n)      n prompts that no `next_batch` returns

    A rollout that generates samples for the next iteration peeks at its prompts; every rank draws the same.
    """

    def __init__(self, prompts: Prompts) -> None:
        super().__init__(prompts)
        self._buffer: list[Prompt] = []

    @property
    def has_curriculum(self) -> bool:
        """Returns whether prompts are chosen by the rewards of their samples, which `observe` reports."""
        return isinstance(self._prompts, Curriculum)

    def next_batch(self, n: int) -> list[Prompt]:
        """Returns the next `n` prompts, buffered ones first."""
        prompts = self.peek(n)
        self._buffer = self._buffer[n:]
        return prompts

    def peek(self, n: int) -> list[Prompt]:
        """Returns the next `n` prompts and keeps them in the buffer, from which `next_batch` returns them."""
        if missing := max(0, n - len(self._buffer)):
            self._buffer += self._prompts.take(missing)
        return self._buffer[:n]

    def draw_extra(self, n: int) -> list[Prompt]:
        """Returns `n` newly drawn prompts; the buffer stays as it is."""
        return self._prompts.take(n) if n > 0 else []

    def observe(self, prompt_ids: Sequence[int], rewards: Sequence[float]) -> dict[str, float]:
        """Reports rewards to the curriculum, if there is one, and returns its metrics.

        Args:
            prompt_ids, rewards: prompt and reward of each sample, the same lists on every rank.
        """
        if not isinstance(self._prompts, Curriculum):
            return {}
        self._prompts.observe(prompt_ids, rewards)
        return self._prompts.metrics()

    def state(self) -> dict[str, Any]:
        """Returns the position in the data and the ids in the buffer as JSON, for `load_state` on the same data."""
        # Only ids: a resumed job reads the prompts from the same files.
        return {"prompts": self._prompts.state(), "buffer": [prompt.id for prompt in self._buffer]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from a `state()`; UserError for one of other data or settings, KeyError for a missing prompt."""
        self._prompts.load_state(state["prompts"])
        self._buffer = [self._prompts.by_id(prompt_id) for prompt_id in state["buffer"]]
