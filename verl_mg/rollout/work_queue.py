"""Distributed work queue for rollout requests: counters in a store that all ranks share, no central scheduler.

    queue.pop(max_samples)     ids of samples for this engine to start
    queue.mark_done(id)        a sample is complete; with the last one of a group the group is complete
    queue.refresh()            reads how far all engines are, in one request to the store
    queue.is_done()            whether enough groups were complete then, on all engines together

`DynamicWorkQueue`: an engine claims a group and pops its samples as slots become free, so that samples of one prompt
share a prefix cache; when every group is claimed, it pops what is left of the groups that other engines claimed.
`StreamingWorkQueue`: a `DynamicWorkQueue` to which groups are appended while engines work.
`FilteredWorkQueue` (`filtered_queue.py`): a `StreamingWorkQueue` in which rejected groups are replaced by others.
`StaticWorkQueue`: an engine has its share from the start, which makes a run bitwise repeatable where its engine is.

Counters, each with the key of the call: `claimed` (attempts to claim a group), `popped/G` (samples that engines
requested of group G, maybe more than it has), `done/G` (its complete samples), `complete` (groups). The number that an
addition returns is what the engine gets:

    groups (0, 1, 2, 3) and (4, 5, 6, 7), engines A and B
    A: pop(3) -> [0, 1, 2]       claimed 1: group 0 is A's; popped/0 is 3
    B: pop(3) -> [4, 5, 6]       claimed 2: group 1 is B's; popped/1 is 3
    A: pop(3) -> [3, 7]          the rest of its group, then, as no group is left to claim, of B's
    B: pop(3) -> []
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.distributed import Store


@dataclass(frozen=True)
class Group:
    """The missing samples of one prompt."""

    fresh: tuple[int, ...]  # ids of samples that any engine may start
    partial: tuple[int, ...] = ()  # ids of samples that were aborted earlier; the engine with their tokens resumes them

    @property
    def size(self) -> int:
        """Returns how many samples are missing."""
        return len(self.fresh) + len(self.partial)


class WorkQueue(ABC):
    """The work of one generation call, created with the same arguments on every rank."""

    def __init__(self, store: Store, key: str, groups: Sequence[Group], num_groups_needed: int) -> None:
        """Creates this rank's view of the queue.

        Args:
            store: shared by all ranks; has the counters.
            key: prefix of the counters, unique for each call.
            groups: all samples of the call.
            num_groups_needed: number of complete groups with which the call is done.
        """
        self._store, self._key, self._groups, self._num_groups_needed = store, key, groups, num_groups_needed
        self._group_of = {i: g for g, group in enumerate(groups) for i in (*group.fresh, *group.partial)}
        self._used_keys: set[str] = set()
        self._num_complete = self._num_claimed = 0
        # Groups that were completed on this rank, each with the number of groups completed before it on all ranks.
        self.completion_order: dict[int, int] = {}
        self.rejected: set[int] = set()  # groups that this rank has rejected, where groups are filtered
        self.filtered_scores: list[float] = []  # scores of the groups that this rank has kept or rejected

    @property
    def num_admitted(self) -> int:
        """Returns how many groups, from the first one on, can be started."""
        return len(self._groups)

    @abstractmethod
    def pop(self, max_samples: int) -> list[int]:
        """Returns up to `max_samples` ids of samples to start; no other engine gets them."""

    def can_queue(self, num_engines: int) -> bool:
        """Returns whether engines may pop samples before they have free slots, without others running out of work."""
        return False

    def mark_done(self, sample: int) -> None:
        """Counts a completed sample; KeyError for an id that is not in the queue."""
        group = self._group_of[sample]
        size = self._groups[group].size
        # The addition that returns the size belongs to the last sample, so a group is counted once.
        if size == 1 or self._add(f"done/{group}", 1) == size:
            self._num_complete = self._add("complete", 1)
            self.completion_order[group] = self._num_complete - 1

    def refresh(self) -> None:
        """Reads the counters upon which `is_done` and `can_queue` decide."""
        self._num_complete, self._num_claimed = self._read_counters("complete", "claimed")

    def is_done(self) -> bool:
        """Returns whether enough groups were complete at the last `refresh` or `mark_done`, on all engines together."""
        return self._num_complete >= self._num_groups_needed

    def delete_keys(self) -> None:
        """Deletes the counters that this rank has used; called when no rank reads them any more."""
        for name in self._used_keys:
            self._store.delete_key(name)

    def _read_counters(self, *names: str) -> list[int]:
        """Returns counters in one request, also before the first addition to them."""
        for name in names:
            if f"{self._key}/{name}" not in self._used_keys:
                self._add(name, 0)  # a counter exists from the first addition on
        return self._read(names)

    def _read(self, names: Iterable[str]) -> list[int]:
        return [int(value) for value in self._store.multi_get([f"{self._key}/{name}" for name in names])]

    def _add(self, name: str, count: int) -> int:
        key = f"{self._key}/{name}"
        self._used_keys.add(key)
        return int(self._store.add(key, count))


class DynamicWorkQueue(WorkQueue):
    """Queue that gives samples to whichever engine has free slots."""

    def __init__(self, store: Store, key: str, groups: Sequence[Group], num_groups_needed: int) -> None:
        super().__init__(store, key, groups, num_groups_needed)
        self._claimed: int | None = None
        self._has_unclaimed = True
        # In the end engines help with groups that others claimed, the last ones first: they have most left.
        self._remaining = list(range(len(groups)))

    def pop(self, max_samples: int) -> list[int]:
        """Returns samples of the group that this engine has claimed, then of groups that others have."""
        popped: list[int] = []
        while len(popped) < max_samples and (group := self._current_group()) is not None:
            samples, is_exhausted = self._pop_from(group, max_samples - len(popped))
            popped += samples
            if is_exhausted:
                self._drop(group)
        return popped

    def can_queue(self, num_engines: int) -> bool:
        """Returns whether there were more unclaimed groups than engines at the last `refresh`."""
        return self._has_unclaimed and self._num_claimed + num_engines < len(self._groups)

    def _current_group(self) -> int | None:
        if self._claimed is None and self._has_unclaimed:
            claimed = self._add("claimed", 1) - 1
            self._has_unclaimed = claimed < len(self._groups)
            self._claimed = claimed if self._has_unclaimed else None
            if not self._has_unclaimed:
                self._drop_exhausted()
        if self._claimed is not None:
            return self._claimed
        return self._remaining[-1] if self._remaining else None

    def _pop_from(self, group: int, count: int) -> tuple[list[int], bool]:
        """Returns samples of a group, and whether none is left."""
        fresh = self._groups[group].fresh
        if self._only_claimer_starts(group):
            return list(fresh), True
        end = self._add(f"popped/{group}", count)  # the samples in front of `end` are this engine's, if they exist
        return list(fresh[end - count : end]), end >= len(fresh)

    def _only_claimer_starts(self, group: int) -> bool:
        """Returns whether the engine that claims a group starts all of it: a single sample, which needs no counter."""
        return len(self._groups[group].fresh) == 1  # others help only when all groups are claimed

    def _drop_exhausted(self) -> None:
        # Forgets the groups without a sample left: one request instead of one for each of them from each engine.
        self._remaining = [group for group in self._remaining if not self._only_claimer_starts(group)]
        # The store answers when all counters exist: an engine adds to one right after its claim.
        popped = self._read(f"popped/{group}" for group in self._remaining) if self._remaining else []
        pairs = zip(self._remaining, popped, strict=True)
        self._remaining = [group for group, count in pairs if count < len(self._groups[group].fresh)]

    def _drop(self, group: int) -> None:
        self._remaining.remove(group)
        if group == self._claimed:
            self._claimed = None


class StreamingWorkQueue(DynamicWorkQueue):
    """Queue to which groups are appended on every rank, in the same order but not at the same time.

    An engine that has claimed a group before it is appended waits for it; meanwhile it helps with groups of others.
    `is_done` returns true with `num_groups_needed` complete groups. Callers serialize the methods.
    """

    def __init__(self, store: Store, key: str, num_groups_needed: int = 0) -> None:
        super().__init__(store, key, [], num_groups_needed)
        self._appended: list[Group] = []
        self._groups = self._appended
        self._next_claim: int | None = None
        self._forgotten: list[int] = []

    @property
    def num_complete(self) -> int:
        """Returns how many groups were complete at the last `refresh` or `mark_done`, on all engines together."""
        return self._num_complete

    def append(self, groups: Iterable[Group]) -> None:
        """Appends groups; ids of samples are distinct from all others."""
        for group in groups:
            index = len(self._appended)
            self._appended.append(group)
            self._group_of |= dict.fromkeys((*group.fresh, *group.partial), index)
            # Engines without a claim help with the last of these first: the oldest group is first in need.
            self._remaining.insert(0, index)

    def forget(self, samples: Iterable[int]) -> None:
        """Removes the groups of samples that were delivered or dropped.

        Their counters are deleted at the next call: until then another rank may look at them.
        """
        for index in self._forgotten:
            for name in (f"{self._key}/done/{index}", f"{self._key}/popped/{index}"):
                if name in self._used_keys:
                    self._used_keys.remove(name)
                    self._store.delete_key(name)
        self._forgotten = sorted({self._group_of.pop(sample) for sample in samples if sample in self._group_of})
        for index in self._forgotten:
            self._appended[index] = Group(())
        self._remaining = [index for index in self._remaining if index not in self._forgotten]
        if self._claimed in self._forgotten:
            self._claimed = None

    def _only_claimer_starts(self, group: int) -> bool:
        return False  # an engine may have to wait with a group that it has claimed, while others have free slots

    def _current_group(self) -> int | None:
        while self._claimed is None:
            if self._next_claim is None:
                self._next_claim = self._add("claimed", 1) - 1
            if self._next_claim >= len(self._appended):
                return self._remaining[-1] if self._remaining else None
            claimed, self._next_claim = self._next_claim, None
            self._claimed = claimed if claimed in self._remaining else None
        return self._claimed


class StaticWorkQueue(WorkQueue):
    """Queue in which each engine has a fixed, contiguous share of the groups.

    Of three groups (0, 1), (2, 3), (4, 5) engine 0 of two has [0, 1], engine 1 has [2, 3, 4, 5].
    """

    def __init__(
        self, store: Store, key: str, groups: Sequence[Group], num_groups_needed: int, engine: int, num_engines: int
    ) -> None:
        super().__init__(store, key, groups, num_groups_needed)
        share = groups[engine * len(groups) // num_engines : (engine + 1) * len(groups) // num_engines]
        self._remaining = [sample for group in share for sample in group.fresh]

    def pop(self, max_samples: int) -> list[int]:
        """Returns the next samples of this engine's share."""
        count = max(max_samples, 0)
        popped, self._remaining = self._remaining[:count], self._remaining[count:]
        return popped


def first_complete_groups(completion_orders: Iterable[dict[int, int]], count: int) -> list[int]:
    """Returns the first `count` groups to be complete, sorted by number, from the `completion_order` of every rank."""
    order = {group: place for completion in completion_orders for group, place in completion.items()}
    return sorted(sorted(order, key=lambda group: order[group])[:count])
