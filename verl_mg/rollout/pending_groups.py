"""Bookkeeping of generation calls: sample ids, groups that wait for a later call, partial samples, save and load.

Nothing here communicates or generates. Ids and groups are the same on every rank, samples are of this rank's engine.

    call 1   prompts A, B, C with 2 samples each, of which 2 groups are needed    A: 0 1    B: 2 3    C: 4 5
             A and C are complete first, B has 2 complete and 3 aborted           select -> [0, 2], which are A and C
             finish with keep_rest                                                B waits: done {2}, partial {3}
             finish without                                                       B is dropped with its samples
    call 2   prompt D, 1 group needed: groups [B, D], next_id 8                   B: 2 3    D: 6 7
             B is missing only 3, which continues on the rank with its tokens     first complete group -> returned
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from pydantic import Field, PositiveInt, model_validator

from verl_mg.config import ConfigSection, Count
from verl_mg.data.prompts import Prompt
from verl_mg.engines.engine import Sample
from verl_mg.rollout.work_queue import Group, first_complete_groups


class PendingGroupState(ConfigSection):
    """A `PendingGroup` in a checkpoint."""

    prompt: Count
    """Id of the prompt."""
    first: Count
    """Id of its first sample."""
    samples: PositiveInt
    """Number of its samples; their ids are consecutive."""
    done: list[int]
    """Ids of complete samples."""
    partial: list[int]
    """Ids of samples that were aborted."""


class RolloutState(ConfigSection):
    """Everything about a rollout that all ranks know, in a checkpoint."""

    next_id: Count
    """First sample id that is free."""
    groups: list[PendingGroupState]
    """Groups that wait for a later call, or the groups of the prefetched call that is in flight."""
    in_flight: Count | None
    """Groups that the call in flight returns; None where no call is in flight."""
    prefetched: list[Count]
    """Prompts that the recipe must request next, for their samples are in flight or ready; in order."""
    prefetched_samples: Count
    """Samples of each prefetched prompt; 0 where none was prefetched."""
    versions: list[int] = Field(default_factory=list)
    """Newest policy versions of the engines, in order; for asynchronous rollouts."""

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        end = 0
        for group in sorted(self.groups, key=lambda group: group.first):
            if group.first < end:
                raise ValueError(f"sample {group.first} belongs to two prompts")
            end = group.first + group.samples
        if end > self.next_id:
            raise ValueError(f"next_id is {self.next_id}, but sample {end - 1} exists")
        return self


@dataclass(frozen=True)
class PendingGroup:
    """A prompt, the ids of its samples, and which of them earlier calls completed (`done`) or aborted (`partial`)."""

    prompt: Prompt
    ids: range
    done: frozenset[int] = frozenset()
    partial: frozenset[int] = frozenset()

    @property
    def missing(self) -> Group:
        """Returns the samples that are left to generate."""
        fresh = tuple(i for i in self.ids if i not in self.done and i not in self.partial)
        return Group(fresh, tuple(sorted(self.partial)))

    def state(self) -> PendingGroupState:
        """Returns the group as written into a checkpoint."""
        return PendingGroupState(
            prompt=self.prompt.id,
            first=self.ids.start,
            samples=len(self.ids),
            done=sorted(self.done),
            partial=sorted(self.partial),
        )

    @classmethod
    def from_state(
        cls,
        state: PendingGroupState,
        prompt_of: Callable[[int], Prompt],
        done: Container[int],
        partial: Container[int],
    ) -> PendingGroup:
        """Returns the group of a checkpoint; samples that no rank has loaded, in `done` or `partial`, are missing."""
        ids = range(state.first, state.first + state.samples)
        still_done = {i for i in state.done if i in done and i in ids}
        still_partial = {i for i in state.partial if i in partial and i in ids} - still_done
        return cls(prompt_of(state.prompt), ids, frozenset(still_done), frozenset(still_partial))


@dataclass(frozen=True)
class GenerationCall:
    """The groups of one generation call."""

    groups: Sequence[PendingGroup]
    """All groups, pending ones first."""
    num_groups_needed: int
    """Number of groups that the call returns: the first to be complete."""
    num_pending: int = 0
    """Number of groups, the first ones, that earlier calls left."""
    is_filtered: bool = False
    """Whether the call returns groups that pass a filter, so that none is complete before the call filters it."""

    @property
    def complete(self) -> list[int]:
        """Returns the indices of groups that are returned as they are: those without missing samples."""
        return [i for i, group in enumerate(self.groups) if not (group.missing.size or self.is_filtered)]

    @property
    def incomplete(self) -> list[int]:
        """Returns the indices of the other groups, which are in the work queue."""
        return [i for i, group in enumerate(self.groups) if group.missing.size or self.is_filtered]

    @property
    def num_missing_groups(self) -> int:
        """Returns how many incomplete groups must be completed."""
        return max(0, self.num_groups_needed - len(self.complete))

    @property
    def prompt_of(self) -> dict[int, Prompt]:
        """Returns the prompt of each sample id."""
        return {i: group.prompt for group in self.groups for i in group.ids}

    def select(self, completion_orders: Iterable[dict[int, int]]) -> list[int]:
        """Returns the sorted indices of the groups that the call returns, from all ranks' completion orders."""
        # The orders number the groups of the work queue, which are the incomplete ones.
        incomplete, missing = self.incomplete, self.num_groups_needed - len(self.complete)
        completed = [incomplete[g] for g in first_complete_groups(completion_orders, missing)]
        return sorted([*self.complete, *completed][: self.num_groups_needed])

    def returns_fresh_groups_only(self, selected: Sequence[int]) -> bool:
        """Returns whether all groups are selected and none was started in an earlier call."""
        return len(selected) == len(self.groups) and not any(group.done or group.partial for group in self.groups)


class PendingGroups:
    """Groups between calls, the next free sample id, and samples of this rank's engine that wait for their group."""

    def __init__(self) -> None:
        self.next_id = 0
        self.groups: list[PendingGroup] = []
        self.completed: dict[int, Sample] = {}
        """Complete samples of this rank's engine whose group has not been returned."""
        self.partial: dict[int, Sample] = {}
        """Aborted samples of this rank's engine of which at least one token was generated."""

    def __len__(self) -> int:
        return len(self.groups)

    def new_call(
        self, prompts: Sequence[Prompt], num_samples: int, num_groups_needed: int, *, is_filtered: bool = False
    ) -> GenerationCall:
        """Returns a call of all pending groups, which come first, and of new ones with new sample ids."""
        new, self.next_id = self._new_groups(prompts, num_samples)
        pending, self.groups = self.groups, []
        groups = pending + new
        return GenerationCall(groups, min(num_groups_needed, len(groups)), len(pending), is_filtered)

    def admitted(self, call: GenerationCall, num_admitted: int) -> GenerationCall:
        """Returns the groups of a call that could be started; the sample ids of the others are free again."""
        # Ids are seeds of samples, and must not depend on how many candidates a call had.
        if num_admitted < len(call.groups):
            self.next_id = call.groups[num_admitted].ids.start
        return replace(call, groups=call.groups[:num_admitted])

    def new_evaluation_call(self, prompts: Sequence[Prompt], num_samples: int) -> GenerationCall:
        """Returns a call of new groups; the next call uses their sample ids again."""
        # Evaluations then do not change the samples of training.
        return GenerationCall(self._new_groups(prompts, num_samples)[0], len(prompts))

    def add_results(self, completed: Mapping[int, Sample], aborted: Mapping[int, Sample]) -> None:
        """Stores what this rank's engine generated in a call."""
        self.completed |= completed
        # A sample without tokens has nothing to continue, so any engine may start it.
        self.partial |= {i: sample for i, sample in aborted.items() if sample.tokens}

    def finish(
        self,
        call: GenerationCall,
        selected: Sequence[int],
        completed: Container[int],
        partial: Container[int],
        *,
        keep_rest: bool,
        rejected: Collection[int] = (),
    ) -> set[int]:
        """Ends a call: groups that were not selected wait for the next one or are dropped, with their samples.

        Returns the ids of the samples that were returned or dropped. `selected` and `rejected` are indices of groups,
        `completed` and `partial` sample ids of all ranks.
        """
        kept = {*selected, *rejected}
        rest = [
            replace(
                group,
                done=group.done | {i for i in group.ids if i in completed},
                partial=frozenset(i for i in group.ids if i in partial),
            )
            for i, group in enumerate(call.groups)
            if keep_rest and i not in kept
        ]
        # Samples of other calls stay: an evaluation may come between two parts of a sample.
        gone = {i for group in call.groups for i in group.ids} - {i for group in rest for i in group.ids}
        self.groups += rest
        self.completed = {i: sample for i, sample in self.completed.items() if i not in gone}
        self.partial = {i: sample for i, sample in self.partial.items() if i not in gone}
        return gone

    def load(
        self,
        next_id: int,
        groups: Iterable[PendingGroup],
        completed: Mapping[int, Sample],
        partial: Mapping[int, Sample],
    ) -> None:
        """Replaces the contents by a checkpoint, without samples that belong to no pending group."""
        self.next_id, self.groups = next_id, list(groups)
        known = {i for group in self.groups for i in group.done | group.partial}
        self.completed = {i: sample for i, sample in completed.items() if i in known}
        self.partial = {i: sample for i, sample in partial.items() if i in known}

    def _new_groups(self, prompts: Sequence[Prompt], num_samples: int) -> tuple[list[PendingGroup], int]:
        starts = [self.next_id + i * num_samples for i in range(len(prompts) + 1)]
        groups = [PendingGroup(p, range(starts[i], starts[i + 1])) for i, p in enumerate(prompts)]
        return groups, starts[-1]
