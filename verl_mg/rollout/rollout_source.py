"""Interface of everything that gives a recipe its samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_mg.batch import Batch
from verl_mg.data.prompts import Prompt
from verl_mg.engines.engine import Sample
from verl_mg.roles.models import Actor
from verl_mg.rollout.filtered_queue import GroupFilter
from verl_mg.rollout.pending_groups import RolloutState
from verl_mg.rows.records import GeneratedRows, RolloutRecord, RolloutRecords


@dataclass(frozen=True)
class LocalRolloutState:
    """The part of a rollout's state that only this rank has."""

    completed: Mapping[int, Sample] = field(default_factory=dict)
    """Complete samples by id, whose groups have not been returned."""
    partial: Mapping[int, Sample] = field(default_factory=dict)
    ready: GeneratedRows | None = None
    """Rows that were generated in advance, and that the next `generate` returns."""


def filter_metrics(num_rejected: int, scores: Sequence[float]) -> dict[str, float]:
    """Returns the metrics of a call that filters groups, from the scores of all kept or rejected samples."""
    mean = sum(scores) / len(scores) if scores else float("nan")
    return {"rollout/rejected_groups": float(num_rejected), "rollout/reward_before_filter": mean}


class RolloutSource(ABC):
    """Source of samples, as a recipe and the training loop use it; all ranks call every method together."""

    is_replay = False
    """Whether the samples were recorded in an earlier run: then there are no engines and no evaluation."""

    def __init__(self, records: RolloutRecords) -> None:
        self._records = records
        self._train_batches: list[Batch] = []
        self._is_last = True
        self.metrics: dict[str, float] = {}
        """Metrics of the last `generate` and the last transfer of weights."""

    @property
    def train_batches(self) -> Sequence[Batch]:
        """Returns the batches of this iteration that `generate` returned."""
        return self._train_batches

    @property
    def records(self) -> Sequence[RolloutRecord]:
        """Returns the records of all batches of this iteration, in the order in which they were returned."""
        return self._records.records

    def start_iteration(self, iteration: int, is_last: bool) -> None:
        """Starts the records of an iteration.

        Args:
            iteration: number of the iteration, from 1.
            is_last: whether no iteration follows, so that no samples are generated in advance.
        """
        self._is_last, self._train_batches = is_last, []
        self._records.clear()

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], num_samples: int = 1) -> Batch:
        """Returns samples of prompts; each rank has other rows.

        Args:
            prompts: the prompts, the same on every rank.
            num_samples: samples of each prompt.
        """

    @abstractmethod
    def generate_filtered(self, num_groups: int, num_samples: int, keep: GroupFilter, max_groups: int) -> Batch:
        """Draws prompts until enough groups pass a filter; each rejected group is replaced by a further prompt.

        Args:
            num_groups: number of groups that are returned; fewer if `max_groups` are not enough.
            num_samples: samples of each prompt.
            keep: whether a group is kept, from the rewards of its samples.
            max_groups: largest number of groups that are generated.

        Returns:
            samples of the groups that are kept; each rank has other rows.
        """

    @abstractmethod
    def generate_greedy(self, prompts: Sequence[Prompt]) -> Batch:
        """Returns the greedy response to each prompt."""

    @abstractmethod
    def generate_for_eval(self, prompts: Sequence[Prompt], num_samples: int, **sampling: Any) -> Batch:
        """Returns samples that are not trained on; they change no training sample.

        Args:
            prompts: the prompts, the same on every rank.
            num_samples: samples of each prompt.
            sampling: fields of `Sampling` that replace the values of training, such as temperature=0.0.
        """

    @abstractmethod
    def update_weights(self, actor: Actor) -> None:
        """Transfers the actor's weights to the engines."""

    @abstractmethod
    def state(self) -> RolloutState | None:
        """Returns what all ranks know of unfinished samples, for a checkpoint; None where there is nothing to save."""

    @abstractmethod
    def local_state(self) -> LocalRolloutState:
        """Returns what only this rank has of unfinished samples, for a checkpoint."""

    @abstractmethod
    def load(self, state: RolloutState, local: LocalRolloutState, prompt_of: Callable[[int], Prompt]) -> None:
        """Resumes from a checkpoint, before the first `update_weights`.

        Args:
            state: of the checkpoint, the same on every rank.
            local: this rank's share of the ranks' local states.
            prompt_of: returns the prompt of an id.
        """

    @abstractmethod
    def resume_in_flight(self) -> None:
        """Starts the samples that were in flight at the checkpoint again, after the first `update_weights`."""

    @abstractmethod
    def close(self) -> None:
        """Ends the engines that this job has started."""
