"""Groups of samples: the states of a group, which groups are where, how many may be outstanding, and checkpoints.

    WAITING ──submitted──▶ RUNNING ──last sample──▶ COMPLETE ──no filter──────────────▶ RETURNED
       ▲                      │                        │ └────scores──▶ SCORED ──kept──▶ RETURNED
       └──partial_rollout─────┤ not needed by its call │ too old          │ rejected
                              └────────────────────────┴──────────────────┴───────────▶ DROPPED

    WAITING    no engine has it: it is new, or left over from a call (`partial_rollout`)
    RUNNING    in a queue of the engines, also as the candidate of a filtered call
    COMPLETE   the samples are complete; their scores are being computed, and `generate` does not wait for them
    SCORED     a filter has seen the scores of all its samples
    RETURNED   its rows were returned; DROPPED: its samples are not needed, or too old (`rollout.stale=drop`)

Nothing here communicates or generates. Groups are the same on every rank, samples and scores are of this rank's engine.

    call 1   prompts A, B, C with 2 samples each, of which 2 groups are needed    A: 0 1    B: 2 3    C: 4 5
             A and C are complete first, B has 2 complete and 3 aborted           A, C: RETURNED
             with `partial_rollout`                                               B: WAITING, done {2}, partial {3}
    call 2   prompt D, 1 group needed: groups B and D, next_id 8                  B: 2 3    D: 6 7
             B is missing only 3, which continues on the rank with its tokens     the first complete group: RETURNED
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from verl_mg.config import Count
from verl_mg.data.prompts import Prompt
from verl_mg.engines.engine import Sample, Sampling
from verl_mg.engines.trajectory import MAX_SAMPLES
from verl_mg.jsonl import StoredRecord

Stale = Literal["continue", "drop"]
"""Treatment of tokens that are too old. continue: they remain in the context, but not in the loss. drop: the group
is dropped, and another prompt takes its place."""
FIRST_EVALUATION_ID = MAX_SAMPLES
"""First sample id of evaluations, which may be in flight together with training's. Rows have the id without it."""


class GroupState(Enum):
    """Place of a group on its way, see the drawing above."""

    WAITING = auto()
    RUNNING = auto()
    COMPLETE = auto()
    SCORED = auto()
    RETURNED = auto()
    DROPPED = auto()


class SavedGroup(StoredRecord):
    """A `Group` as checkpoints contain it."""

    prompt: Count  # id of the prompt
    first: Count  # id of its first sample
    samples: PositiveInt  # number of its samples; their ids are consecutive
    done: list[int]  # ids of complete samples
    partial: list[int]  # ids of samples that were aborted


class RolloutState(StoredRecord):
    """Everything about a rollout that all ranks know, in a checkpoint."""

    next_id: Count  # first sample id that is free
    groups: list[SavedGroup]
    """Groups that wait for a later call, or the groups of the prefetched call that is in flight."""
    in_flight: Count | None  # groups that the call in flight returns; None where no call is in flight
    prefetched: list[Count]
    """Prompts that the recipe must request next, for their samples are in flight or ready; in order."""
    prefetched_samples: Count  # samples of each prefetched prompt; 0 where none was prefetched
    versions: list[int] = Field(default_factory=list)
    """Newest policy versions of the engines, in order; for asynchronous rollouts."""
    drawn: dict[str, Any] = Field(default_factory=dict)
    """Keys and values of `how_drawn`, of all samples; {} where they are not known."""

    def changed(self, drawn: Mapping[str, Any]) -> list[str]:
        """Returns the keys of a job that draws samples in another way; `drawn` is its `how_drawn`."""
        return [key for key, value in self.drawn.items() if value != drawn.get(key, value)]

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


def how_drawn(sampling: Sampling, agent_names: Sequence[str]) -> dict[str, Any]:
    """Returns by configuration key what log-probs and columns of samples depend on; samples of others do not fit."""
    return {
        "rollout.temperature": sampling.temperature,
        "rollout.top_p": sampling.top_p,
        "rollout.top_k": sampling.top_k,
        "rollout.min_p": sampling.min_p,
        "algorithm.support": sampling.reports_support,
        "algorithm.off_policy.score_centering": sampling.top_logprobs,
        "rollout.agent_names": list(agent_names),
    }


@dataclass(eq=False)
class Group:
    """A prompt with the ids of its samples, for training or, from `FIRST_EVALUATION_ID` on, for an evaluation.

    Example: of the samples 4, 5, 6 and 7 `done` are {4}, and {6} was aborted after some tokens: `fresh` are (5, 7).
    """

    prompt: Prompt
    ids: range
    done: frozenset[int] = frozenset()
    """Samples that were complete before the group was put into a queue, or when it was looked at last."""
    partial: frozenset[int] = frozenset()
    """Samples that were aborted; the rank with their tokens continues them."""
    state: GroupState = GroupState.WAITING

    @property
    def fresh(self) -> tuple[int, ...]:
        """Returns the samples that any engine may start."""
        return tuple(i for i in self.ids if i not in self.done and i not in self.partial)

    @property
    def num_missing(self) -> int:
        """Returns how many samples are left to generate."""
        return len(self.ids) - len(self.done)

    def saved(self) -> SavedGroup:
        """Returns the group as written into a checkpoint."""
        return SavedGroup(
            prompt=self.prompt.id,
            first=self.ids.start,
            samples=len(self.ids),
            done=sorted(self.done),
            partial=sorted(self.partial),
        )


class GroupBuffer:
    """Groups that were neither returned nor dropped, by state, with the samples and scores that this rank has of them.

    The thread of the engine's worker adds samples and scores; whoever iterates over them stops it meanwhile.
    """

    def __init__(self) -> None:
        self.next_id = 0
        self.training: list[Group] = []
        """Groups of training, in the order of their ids."""
        self._group_of: dict[int, Group] = {}
        self.completed: dict[int, Sample] = {}
        """Complete samples of this rank's engine."""
        self.partial: dict[int, Sample] = {}
        """Aborted samples of this rank's engine of which at least one token was generated."""
        self.score_ids: dict[int, int] = {}
        """Number of the score of each complete sample."""

    def add(self, prompts: Iterable[Prompt], num_samples: int) -> list[Group]:
        """Adds a group of training for each prompt, with new sample ids."""
        groups = self._number(prompts, num_samples, self.next_id)
        self.next_id += num_samples * len(groups)
        self.training += groups
        return groups

    def add_evaluation(self, prompts: Iterable[Prompt], num_samples: int, first: int) -> list[Group]:
        """Adds groups of an evaluation whose samples have the numbers from `first` on, and change no id of training."""
        return self._number(prompts, num_samples, FIRST_EVALUATION_ID + first)

    def withdraw(self, groups: Sequence[Group]) -> None:
        """Removes the newest groups, candidates that were never started; their sample ids are free again."""
        # Ids are seeds of samples, and must not depend on how many candidates a call had.
        if groups:
            self.next_id = groups[0].ids.start
            self.remove(groups, GroupState.DROPPED)

    def prompt_of(self, sample: int) -> Prompt:
        """Returns the prompt of a sample."""
        return self._group_of[sample].prompt

    def update(self, groups: Iterable[Group], completed: Collection[int], partial: Collection[int]) -> None:
        """Sets which samples of groups are complete and which were aborted, on all ranks."""
        for group in groups:
            group.done = frozenset(i for i in group.ids if i in completed)
            group.partial = frozenset(i for i in group.ids if i in partial) - group.done
            if not group.num_missing:
                group.state = GroupState.COMPLETE

    def remove(self, groups: Iterable[Group], state: GroupState) -> list[int]:
        """Removes groups that were returned or dropped, with their samples; returns the numbers of their scores."""
        scores = []
        for group in groups:
            group.state = state
            for i in group.ids:
                for samples in (self._group_of, self.completed, self.partial):
                    samples.pop(i, None)
                if i in self.score_ids:
                    scores.append(self.score_ids.pop(i))
        self.training = [group for group in self.training if group.ids.start in self._group_of]
        return scores

    def load(
        self,
        state: RolloutState,
        prompt_of: Callable[[int], Prompt],
        completed: Mapping[int, Sample],
        partial: Mapping[int, Sample],
        all_completed: Collection[int],
        all_partial: Collection[int],
    ) -> None:
        """Replaces the contents by a checkpoint; samples that are on no rank are missing, and generated again."""
        saved = state.groups
        self.next_id = state.next_id
        self.training = [Group(prompt_of(s.prompt), range(s.first, s.first + s.samples)) for s in saved]
        self._group_of = {i: group for group in self.training for i in group.ids}
        done, aborted = {i for s in saved for i in s.done}, {i for s in saved for i in s.partial}
        self.update(self.training, done.intersection(all_completed), aborted.intersection(all_partial))
        known = {i for group in self.training for i in group.done | group.partial}
        self.completed = {i: sample for i, sample in completed.items() if i in known}
        self.partial = {i: sample for i, sample in partial.items() if i in known}

    def _number(self, prompts: Iterable[Prompt], num_samples: int, first: int) -> list[Group]:
        starts = enumerate(prompts)
        groups = [Group(p, range(first + n * num_samples, first + (n + 1) * num_samples)) for n, p in starts]
        self._group_of |= {i: group for group in groups for i in group.ids}
        return groups


def sample_number(sample: int) -> int:
    """Returns the id that rows and seeds have: of evaluations the id without `FIRST_EVALUATION_ID`."""
    return sample % FIRST_EVALUATION_ID


def sample_seed(seed: int, sample_id: int) -> int:
    """Returns the seed of a sample, a hash of the job's seed and the sample id: it does not depend on the ranks."""
    digest = hashlib.blake2b(f"{seed}:{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # 63 bits, which fit a signed integer


def first_complete(
    groups: Sequence[Group], queued: Sequence[Group], orders: Iterable[Mapping[int, int]], count: int
) -> list[Group]:
    """Returns `count` groups in their order: those that needed no queue, and the first of the queue to be complete.

    `orders` have the place of each complete group of the queue, by its number there, as each rank has counted it.
    """
    place = {queued[number]: place for order in orders for number, place in order.items()}
    in_queue = set(queued)
    before = [group for group in groups if group not in in_queue]
    chosen = {*[*before, *sorted(place, key=place.__getitem__)][:count]}
    return [group for group in groups if group in chosen]


@dataclass
class StalenessBound:
    """Bound on the staleness of tokens in asynchronous rollouts, and the newest versions that the engines have had.

    The staleness of a token is the number of weight updates between the weights that generated it and those that are
    trained with it. A batch of n groups is returned before each update. While k n groups are outstanding, a group that
    is started now is returned after at most k further updates if the oldest complete groups are returned first; so
    staleness m permits m n outstanding groups beyond those that `generate` waits for (AReaL, arXiv:2505.24298,
    equation 3). Only samples that take longer than m updates become too old all the same; `stale` decides about them.

    Engines do not run further ahead than training needs, because samples that wait only become older. Each `generate`
    of n groups adapts how many are outstanding when it returns (`num_ahead`), here for n = 4 and m = 3:

        outstanding 8, 6 complete       2 more than needed: engines are faster         ->  6, at least n = 4
        outstanding 8, 1 complete       3 too few: training waits for samples          -> 11, at most m n = 12
        the same, engines run 5 groups  more would only wait for engines               ->  9 = 5 + n

    With max_staleness = 2, after the updates 0 to 4, `recent` is [2, 3, 4]. A token of version 4 has age 0, of version
    2 age 2, and of versions 0 and 1 age 3: these are too old.
    """

    max_staleness: int
    """Largest number of updates between generation and training of a token."""
    stale: Stale
    recent: list[int] = field(default_factory=list)
    """The newest versions in order, at most `max_staleness + 1` of them."""
    num_runnable: int | None = None
    """Groups that all engines run together by their load; None where their number of requests does not follow it."""
    _num_wanted: int = 0

    def push(self, version: int) -> None:
        """Adds a version that the engines now have; nothing where it is the newest one already."""
        if self.recent[-1:] != [version]:
            self.recent = [*self.recent, version][-self.max_staleness - 1 :]

    @property
    def newest(self) -> int:
        """Returns the version of the last update."""
        return self.recent[-1]

    @property
    def oldest_allowed(self) -> int:
        """Returns the oldest version whose tokens may be trained now."""
        return self.recent[0]

    def age(self, version: int) -> int:
        """Returns the staleness of a token of some version; max_staleness + 1 for all that are too old."""
        return sum(other > version for other in self.recent) if version >= self.recent[0] else self.max_staleness + 1

    def num_ahead(self, num_groups: int) -> int:
        """Returns how many groups may be outstanding when a `generate` of `num_groups` returns."""
        # At first the groups of one call; `adapt` learns from then on.
        return min(max(self._num_wanted, num_groups), self.largest(num_groups))

    def largest(self, num_groups: int) -> int:
        """Returns how many groups may be outstanding at most, whatever training needs."""
        # Those beyond what engines run, and the batch that they complete until the next call, would only wait.
        permitted = self.max_staleness * num_groups
        return permitted if self.num_runnable is None else min(permitted, self.num_runnable + num_groups)

    def adapt(self, num_complete: int, num_groups: int) -> None:
        """Adapts how many groups are outstanding, when a `generate` is called."""
        wanted = max(self._num_wanted, num_groups) + num_groups - num_complete
        self._num_wanted = max(num_groups, min(wanted, self.largest(num_groups)))

    def select(self, groups: Sequence[Group], oldest: Mapping[int, int], count: int) -> tuple[list[Group], list[Group]]:
        """Returns at most `count` complete groups, chosen by their oldest tokens, and those that are to be dropped.

        `oldest` has the version of the oldest token of each complete sample. Example: groups 0, 2 and 4 of two samples
        each, engines with the versions 3 and 4, `max_staleness` 1:

            oldest version of complete samples    0: 4   1: 4   2: 3   3: 4   4: 4         5 is in flight
            select(groups, oldest, 1)             group 2, whose oldest token is the oldest; 4 is not complete
            with 2: 2 and stale="drop"            drops group 2, and returns group 0
        """
        age = {g: min(oldest[i] for i in g.ids) for g in groups if all(i in oldest for i in g.ids)}
        dropped = [g for g, version in age.items() if self.stale == "drop" and version < self.oldest_allowed]
        usable = sorted(age.keys() - dropped, key=lambda g: (age[g], g.ids.start))
        return sorted(usable[:count], key=lambda g: g.ids.start), dropped

    def too_old(self, groups: Sequence[Group], oldest: Iterable[tuple[int, int]]) -> list[Group]:
        """Returns the groups that can no longer be trained.

        `oldest` has (sample id, version of its oldest token) of the samples in flight on all ranks.
        """
        too_old = {i for i, version in oldest if version < self.oldest_allowed}
        # Whole groups: advantages need all samples of a prompt.
        return [group for group in groups if too_old.intersection(group.ids)]
