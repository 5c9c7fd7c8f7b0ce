"""The prompts of a job as its recipe and its rollout draw them, with a buffer of prompts that were drawn early."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_mg.data.curriculum import Curriculum
from verl_mg.data.prompts import Prompt, Prompts


class PromptFeed:
    """Draws prompts in the order of the underlying `Prompts`, each of them once.

        feed.next_batch(n)      the next n prompts for the recipe
        feed.peek(n)            the prompts that the next `next_batch(n)` returns
        feed.draw_extra(n)      n prompts that no `next_batch` returns

    A rollout that generates samples for the next iteration peeks at its prompts; every rank draws the same.
    """

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._buffer: list[Prompt] = []

    @property
    def dropped(self) -> int:
        """Returns how many prompts were left out for their length."""
        return self._prompts.dropped

    @property
    def has_curriculum(self) -> bool:
        """Returns whether prompts are chosen by the rewards of their samples, which `observe` reports."""
        return isinstance(self._prompts, Curriculum)

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def first(self, n: int) -> list[Prompt]:
        """Returns the first `n` prompts of each source, in file order."""
        return self._prompts.first(n)

    def by_id(self, prompt_id: int) -> Prompt:
        """Returns the prompt with that id; KeyError where there is none or it was dropped."""
        return self._prompts.by_id(prompt_id)

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
