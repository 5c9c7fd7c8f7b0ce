"""Staleness of samples in asynchronous rollouts: how many groups may be outstanding, and which are returned.

The staleness of a token is the number of weight updates between the weights that generated it and those that are
trained with it. Nothing here communicates or generates: the state is the same on every rank.

A batch of n groups is returned before each update. While k n groups are outstanding, a group that is started now is
returned after at most k further updates if the oldest complete groups are returned first; so staleness m permits m n
outstanding groups beyond those that `generate` waits for (AReaL, arXiv:2505.24298, equation 3). Only samples that take
longer than m updates to generate become too old all the same; `stale` decides about them.

Engines do not run further ahead than training needs, because samples that wait only become older. Each call of
`generate` with n groups adapts how many are outstanding when it returns (`num_ahead`), here for n = 4 and m = 3:

    outstanding 8, 6 complete       2 more than needed: engines are faster         ->  6, at least n = 4
    outstanding 8, 1 complete       3 too few: training waits for samples          -> 11, at most m n = 12
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from verl_mg.data.prompts import Prompt
from verl_mg.rollout.pending_groups import PendingGroup

Stale = Literal["continue", "drop"]
"""Treatment of tokens that are too old. continue: they remain in the context, but not in the loss. drop: the group
is dropped, and another prompt takes its place."""


@dataclass
class PolicyVersions:
    """Newest versions of the weights that the engines have had.

    Example: with max_staleness = 2, after the updates 0 to 4, `recent` is [2, 3, 4]. A token of version 4 has age 0, of
    version 2 age 2, and of versions 0 and 1 age 3: these are too old.
    """

    max_staleness: int
    """Largest number of updates between generation and training of a token."""
    recent: list[int] = field(default_factory=list)
    """The newest versions in order, at most `max_staleness + 1` of them."""

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


@dataclass(frozen=True)
class Selection:
    """Groups that leave the buffer: returned ones in the order of their ids, and dropped ones with too old tokens."""

    returned: list[PendingGroup]
    dropped: list[PendingGroup]


class OutstandingGroups:
    """Groups that were submitted and not yet returned, by the id of their first sample.

    Example: groups 0, 2 and 4 of two samples each, engines with the versions 3 and 4, `max_staleness` 1:

        oldest version of complete samples    0: 4   1: 4   2: 3   3: 4   4: 4         5 is in flight
        select(..., count=1)                  returns group 2, whose oldest token is the oldest; 4 is not complete
        with 2: 2 and stale="drop"            drops group 2, and returns group 0
    """

    def __init__(self, versions: PolicyVersions, stale: Stale) -> None:
        self.versions, self.stale = versions, stale
        self.next_id = 0
        self.groups: dict[int, PendingGroup] = {}
        self._num_wanted = 0

    def admit(self, prompts: Sequence[Prompt], num_samples: int) -> list[PendingGroup]:
        """Returns one new group for each prompt, with new sample ids."""
        new = []
        for prompt in prompts:
            new.append(PendingGroup(prompt, range(self.next_id, self.next_id + num_samples)))
            self.next_id += num_samples
        self.groups |= {group.ids.start: group for group in new}
        return new

    def num_ahead(self, num_groups: int) -> int:
        """Returns how many groups may be outstanding when a `generate` of `num_groups` returns."""
        # At first the groups of one call; `adapt` learns from then on.
        return min(max(self._num_wanted, num_groups), self.versions.max_staleness * num_groups)

    def adapt(self, done: Container[int], num_groups: int) -> None:
        """Adapts how many groups are outstanding, when a `generate` is called."""
        num_complete = sum(all(i in done for i in group.ids) for group in self.groups.values())
        wanted = max(self._num_wanted, num_groups) + num_groups - num_complete
        self._num_wanted = max(num_groups, min(wanted, self.versions.max_staleness * num_groups))

    def select(self, oldest: Mapping[int, int], count: int) -> Selection:
        """Removes and returns at most `count` complete groups, chosen by their oldest tokens.

        `oldest` has the version of the oldest token of each complete sample, on whatever rank the sample is.
        """
        age = {
            first: min(oldest[i] for i in group.ids)
            for first, group in self.groups.items()
            if all(i in oldest for i in group.ids)
        }
        too_old = [first for first, version in age.items() if version < self.versions.oldest_allowed]
        dropped = too_old if self.stale == "drop" else []
        usable = sorted((version, first) for first, version in age.items() if first not in dropped)
        returned = sorted(first for _, first in usable[:count])
        return Selection(self._remove(returned), self._remove(dropped))

    def drop_unfinished(self, oldest: Iterable[tuple[int, int]]) -> list[PendingGroup]:
        """Removes and returns the groups with unfinished samples that can no longer be trained, with `stale="drop"`.

        `oldest` has (sample id, version of its oldest token) of the samples in flight on all ranks.
        """
        if self.stale != "drop":
            return []
        too_old = {i for i, version in oldest if version < self.versions.oldest_allowed}
        # Whole groups: advantages need all samples of a prompt.
        return self._remove([first for first, group in self.groups.items() if too_old.intersection(group.ids)])

    def progress(self, done: Iterable[int], partial: Iterable[int]) -> list[PendingGroup]:
        """Returns all groups with their complete and aborted samples, for a checkpoint."""
        all_done, all_partial = frozenset(done), frozenset(partial)
        return [
            replace(group, done=all_done.intersection(group.ids), partial=all_partial.intersection(group.ids))
            for group in self.groups.values()
        ]

    def _remove(self, firsts: Sequence[int]) -> list[PendingGroup]:
        return [self.groups.pop(first) for first in firsts]
