"""Who works on which sample, without anybody who tells: leaders of engines take work from counters that all share.

    deal.take(room)        ids for this engine to begin, as many as it has room for
    deal.finish(id)        a sample is done; when the last of its group is, the group is complete
    deal.over()            whether nothing is left to begin or to wait for: enough groups are complete

`DynamicWorkQueue`: an engine opens a group and takes its samples as it finds room, so that samples of one prompt meet
one prefix cache; with no group left to open, it takes what is left of the groups that others have opened.
`StaticWorkQueue`: an engine has its share from the start, which makes a run repeatable to the bit where its engine is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.distributed import Store


@dataclass(frozen=True)
class Group:
    """The samples of one prompt that are missing: `fresh` ones, which any engine begins, and `begun`, which the engine
    that began them goes on with."""

    fresh: tuple[int, ...]
    begun: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """How many samples are missing."""
        return len(self.fresh) + len(self.begun)


class WorkQueue(ABC):
    """The work of one call, the same on every rank. `key` is new for each call; `enough`: groups that are wanted."""

    def __init__(self, store: Store, key: str, groups: Sequence[Group], enough: int) -> None:
        self._store, self._key, self._groups, self._enough = store, key, groups, enough
        self._group_of = {i: g for g, group in enumerate(groups) for i in (*group.fresh, *group.begun)}
        self._used: set[str] = set()
        self.order: dict[int, int] = {}
        """Groups that were completed here -> how many were complete before."""

    @abstractmethod
    def take(self, room: int) -> list[int]:
        """Up to `room` samples to begin, each given to one engine."""

    def plenty(self, engines: int) -> bool:
        """Whether every engine can take some work ahead, and none would later wait for what another took."""
        return False

    def finish(self, sample: int) -> None:
        """Count a sample; ids that were not dealt here do not exist."""
        group = self._group_of[sample]
        if self._add(f"done/{group}", 1) == self._groups[group].size:
            self.order[group] = self._add("complete", 1) - 1

    def over(self) -> bool:
        """Whether enough groups are complete, on whatever engines."""
        return self._add("complete", 0) >= self._enough

    def forget(self) -> None:
        """Take this rank's counters out of the store, once nobody asks any more."""
        for name in self._used:
            self._store.delete_key(name)

    def _add(self, name: str, count: int) -> int:
        key = f"{self._key}/{name}"
        self._used.add(key)
        return int(self._store.add(key, count))


class DynamicWorkQueue(WorkQueue):
    """Work goes to whichever engine has room."""

    def __init__(self, store: Store, key: str, groups: Sequence[Group], enough: int) -> None:
        super().__init__(store, key, groups, enough)
        self._open: int | None = None
        self._unopened = True
        # What others have opened: the last groups have most left.
        self._others = list(range(len(groups)))

    def take(self, room: int) -> list[int]:
        """See `WorkQueue`."""
        taken: list[int] = []
        while len(taken) < room and (group := self._current()) is not None:
            found = self._from(group, room - len(taken))
            taken += found
            if not found:
                self._leave(group)
        return taken

    def plenty(self, engines: int) -> bool:
        """See `WorkQueue`: while there are more unopened groups than engines."""
        return self._unopened and self._add("opened", 0) + engines < len(self._groups)

    def _current(self) -> int | None:
        if self._open is None and self._unopened:
            opened = self._add("opened", 1) - 1
            self._unopened = opened < len(self._groups)
            self._open = opened if self._unopened else None
        if self._open is not None:
            return self._open
        return self._others[-1] if self._others else None

    def _from(self, group: int, count: int) -> list[int]:
        end = self._add(f"taken/{group}", count)
        return list(self._groups[group].fresh[end - count : end])

    def _leave(self, group: int) -> None:
        self._others.remove(group)
        if group == self._open:
            self._open = None


class StaticWorkQueue(WorkQueue):
    """Each engine has its run of the groups."""

    def __init__(self, store: Store, key: str, groups: Sequence[Group], enough: int, engine: int, engines: int) -> None:
        super().__init__(store, key, groups, enough)
        mine = groups[engine * len(groups) // engines : (engine + 1) * len(groups) // engines]
        self._left = [sample for group in mine for sample in group.fresh]

    def take(self, room: int) -> list[int]:
        """See `WorkQueue`."""
        taken, self._left = self._left[: max(room, 0)], self._left[max(room, 0) :]
        return taken


def complete_groups(orders: Iterable[dict[int, int]], enough: int) -> list[int]:
    """The first `enough` groups to be complete, in their own order, from the orders of all leaders."""
    order = {group: place for own in orders for group, place in own.items()}
    return sorted(sorted(order, key=lambda group: order[group])[:enough])
