"""The rollout of a replay: what a recipe asks for was drawn in an earlier run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_mg.batch import Batch
from verl_mg.data import Prompt
from verl_mg.errors import UserError
from verl_mg.monitor.sample_reader import SampleReader
from verl_mg.roles.models import Actor
from verl_mg.roles.rollout_record import RolloutRecord


class ReplayRollout:
    """Hands out recorded batches in the order in which they were handed to the recipe, whatever prompts it names.

    To a recipe it is a `Rollout` whose engines have always finished what they were asked for.
    """

    unfinished = 0

    def __init__(self, recording: SampleReader) -> None:
        self._recording, self._iteration = recording, 0
        self._left: list[Batch] = []
        self.drawing = False
        self.produced: list[Batch] = []
        self.handed: list[RolloutRecord] = []
        self.metrics: dict[str, float] = {}

    def enter(self, iteration: int) -> None:
        """See `Rollout.enter`."""
        self._iteration, self._left = iteration, self._recording.batches(iteration)
        self.produced, self.handed = [], []

    def generate(self, prompts: Sequence[Prompt], samples: int = 1, keep: int | None = None) -> Batch:
        """See `Rollout.generate`."""
        self.begin(prompts, samples, keep)
        return self.finish()

    def begin(self, prompts: Sequence[Prompt], samples: int = 1, keep: int | None = None, ahead: bool = False) -> None:
        """See `Rollout.begin`."""
        self.drawing = True

    def finish(self) -> Batch:
        """See `Rollout.finish`."""
        self.drawing = False
        batch = self._next()
        self.produced.append(batch)
        return batch

    def greedy(self, prompts: Sequence[Prompt]) -> Batch:
        """See `Rollout.greedy`."""
        return self._next()

    def aside(self, prompts: Sequence[Prompt], samples: int, temperature: float) -> Batch:
        """See `Rollout.aside`."""
        return self._next()

    def sync(self, actor: Actor) -> None:
        """No engine wants the weights."""

    def load(self, *state: Any) -> None:
        """What the run had begun is recorded where it was finished."""

    def go_on(self) -> None:
        """See `load`."""

    def close(self) -> None:
        """There is nothing to end."""

    def _next(self) -> Batch:
        if not self._left:
            raise UserError(
                f"iteration {self._iteration}: the recipe asks for more batches than were recorded; "
                "replay with the settings of the run"
            )
        batch = self._left.pop(0)
        self.handed.append(RolloutRecord.of(batch))
        return batch
