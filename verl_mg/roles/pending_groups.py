"""Prompts that a rollout was asked to answer, and how they outlive a process."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Self

from pydantic import PositiveInt, model_validator

from verl_mg.config import ConfigSection, Count
from verl_mg.data.prompts import Prompt
from verl_mg.rollout.work_queue import Group


class PendingGroupState(ConfigSection):
    """A prompt that is not answered yet; samples by their ids."""

    prompt: Count
    first: Count
    samples: PositiveInt
    done: list[int]
    begun: list[int]


class RolloutState(ConfigSection):
    """drawing: how many of what waits were being drawn ahead; None where nothing was."""

    next_id: Count
    waiting: list[PendingGroupState]
    drawing: Count | None

    @model_validator(mode="after")
    def _ids_are_given_once(self) -> Self:
        taken = 0
        for one in sorted(self.waiting, key=lambda one: one.first):
            if one.first < taken:
                raise ValueError(f"sample {one.first} is of two prompts")
            taken = one.first + one.samples
        if taken > self.next_id:
            raise ValueError(f"next_id is {self.next_id}, and sample {taken - 1} is there")
        return self


@dataclass(frozen=True)
class PendingGroup:
    """A prompt and the ids of its samples; `done` and `begun` are those of before, wherever they lie."""

    prompt: Prompt
    ids: range
    done: frozenset[int] = frozenset()
    begun: frozenset[int] = frozenset()

    @property
    def group(self) -> Group:
        """What is left to do."""
        fresh = tuple(i for i in self.ids if i not in self.done and i not in self.begun)
        return Group(fresh, tuple(sorted(self.begun)))

    def state(self) -> PendingGroupState:
        """To be written down."""
        done, begun = sorted(self.done), sorted(self.begun)
        return PendingGroupState(
            prompt=self.prompt.id, first=self.ids.start, samples=len(self.ids), done=done, begun=begun
        )

    @classmethod
    def of(
        cls, state: PendingGroupState, prompt_of: Callable[[int], Prompt], done: Container[int], begun: Container[int]
    ) -> PendingGroup:
        """The way back; of what was done and had begun, those in `done` and `begun` are still somewhere."""
        ids = range(state.first, state.first + state.samples)
        kept = {i for i in state.done if i in done and i in ids}
        still = {i for i in state.begun if i in begun and i in ids} - kept
        return cls(prompt_of(state.prompt), ids, frozenset(kept), frozenset(still))
