"""Distributed work queue for rollout requests: counters in a store that all ranks share, no central scheduler.

    queue.pop(max_samples)     ids of samples for this engine to start
    queue.mark_done(ids)       samples are complete; with the last one of a group the group is complete
    queue.refresh()            reads how far all engines are, in one request to the store
    queue.is_done()            whether enough groups were complete then, on all engines together

An engine claims a group and pops its samples as slots become free, so that samples of one prompt share a prefix cache;
when every group is claimed, it pops what is left of the groups that other engines claimed. Groups are known from the
start, as in a call, or appended to a queue that `is_open`, on every rank in the same order but not at the same time: an
engine that has claimed a group before it is appended waits for it, and meanwhile helps with groups of others. With a
`StaticShare` each engine has its share from the start, which makes a run bitwise repeatable where its engine is.

Counters, each with the key of the queue: `claimed` (attempts to claim a group), `popped/G` (samples that engines
requested of group G, maybe more than it has), `done/G` (its complete samples), `complete` (groups). The number that an
addition returns is what the engine gets:

    groups (0, 1, 2, 3) and (4, 5, 6, 7), engines A and B
    A: pop(3) -> [0, 1, 2]       claimed 1: group 0 is A's; popped/0 is 3
    B: pop(3) -> [4, 5, 6]       claimed 2: group 1 is B's; popped/1 is 3
    A: pop(3) -> [3, 7]          the rest of its group, then, as no group is left to claim, of B's
    B: pop(3) -> []

With a `ScoreFilter` the groups are candidates, of which those whose scores it keeps count as complete:

    sample complete                 waits for its score on the rank that generated it
    score there, at a `refresh`     score and number of scores of the group ──▶ store
    last score of a group           the rank that adds it reads all of them, and keeps or rejects the group
    group rejected                  on each rank, at its next `refresh`, one more candidate can be started

Candidates are started in order, and a group is replaced only when it is rejected: without extra groups the call returns
the first groups in the order of the candidates that the filter keeps, whatever the speed of engines and of rewards.

    needed: 2 groups of the candidates 0, 1 and 2 with the samples (0, 1), (2, 3), (4, 5), where scores differ
    started 0, 1    scores (1, 1): group 0 is rejected, 2 is started;  (0, 1): group 1 is kept
    started 2       scores (1, 0): group 2 is kept;  done: order {1: 0, 2: 1}, rejected {0}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from verl_mg.engines.engine import Sampling
from verl_mg.rollout.groups import Group

# Whether a group is kept, from the scores of its samples in the order of their ids.
GroupFilter = Callable[[Sequence[float]], bool]


def keeps(keep: GroupFilter, scores: Sequence[Mapping[str, float]]) -> bool:
    """Returns whether a filter keeps the scores of any agent in the samples of a prompt."""
    by_agent: dict[str, list[float]] = {}
    for of_sample in scores:
        for agent, score in of_sample.items():
            by_agent.setdefault(agent, []).append(score)
    return any(keep(of_agent) for of_agent in by_agent.values())


def filter_metrics(num_rejected: int, scores: Sequence[float]) -> dict[str, float]:
    """Returns the metrics of a call that filters groups, from the scores of all kept or rejected samples."""
    mean = sum(scores) / len(scores) if scores else float("nan")
    return {"rollout/rejected_groups": float(num_rejected), "rollout/reward_before_filter": mean}


@dataclass(frozen=True)
class StaticShare:
    """Fixed, contiguous share of all groups: of three groups, the first of two engines starts one, the second two."""

    engine: int
    """Number of the engine."""
    num_engines: int

    def of(self, groups: Sequence[Group]) -> list[int]:
        """Returns the samples that this engine starts."""
        begin, end = ((self.engine + i) * len(groups) // self.num_engines for i in (0, 1))
        return [i for group in groups[begin:end] for i in group.fresh]


@dataclass(frozen=True)
class ScoreFilter:
    """Filter of groups by the scores of their samples."""

    keep: GroupFilter
    score_of: Callable[[int], Mapping[str, float] | None]
    """Scores of a complete sample of this rank by agent, None while it is not scored; see `RewardRole.scores`."""
    num_extra: int
    """Number of groups that are started beyond the needed ones."""


class WorkQueue:
    """This rank's view of a queue; callers serialize the methods.

    `key` is the prefix of the counters and unique; `sampling` says how tokens of its samples are drawn. The queue is
    done when `num_needed` groups are complete.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        sampling: Sampling,
        groups: Sequence[Group] = (),
        num_needed: int = 0,
        *,
        is_open: bool = False,
        share: StaticShare | None = None,
        score_filter: ScoreFilter | None = None,
    ) -> None:
        self._store, self.key, self.sampling, self.is_open = store, key, sampling, is_open
        self._num_needed, self._candidates, self._filter = num_needed, groups, score_filter
        self._grows = is_open or score_filter is not None
        self._fresh: list[tuple[int, ...]] = []
        self._sizes: list[int] = []
        self._group_of: dict[int, int] = {}
        self._used_keys: set[str] = set()
        self._num_complete = self._num_claimed = self._num_rejected = 0
        self._claimed: int | None = None
        self._next_claim: int | None = None
        self._has_unclaimed = True
        # Groups that engines without a claim help with, the last one first.
        self._remaining: list[int] = []
        self._forgotten: list[int] = []
        self._unscored: list[int] = []
        # Groups that were completed on this rank, each with the number of groups completed before it on all ranks.
        self._completion_order: dict[int, int] = {}
        self._rejected: list[int] = []
        self._scores: list[float] = []
        self._share = share.of(groups) if share else None
        self.append(groups[: self._num_admitted])

    def append(self, groups: Iterable[Group]) -> None:
        """Appends groups; ids of samples are distinct from all others."""
        for group in groups:
            index = len(self._fresh)
            self._fresh.append(group.fresh)  # a copy: the group changes when its samples are complete
            self._sizes.append(group.num_missing)
            self._group_of |= dict.fromkeys(group.ids, index)
            # In a call the last groups have most left in the end; else the oldest group is first in need.
            self._remaining.insert(0 if self._grows else index, index)

    def expect(self, num_groups: int) -> None:
        """Makes an open queue done when this many groups were completed since its beginning."""
        self._num_needed = num_groups

    def pop(self, max_samples: int) -> list[int]:
        """Returns up to `max_samples` ids of samples to start; no other engine gets them."""
        if self._share is not None:
            count = max(max_samples, 0)
            popped, self._share = self._share[:count], self._share[count:]
            return popped
        popped = []
        while len(popped) < max_samples and (group := self._current_group()) is not None:
            samples, is_exhausted = self._pop_from(group, max_samples - len(popped))
            popped += samples
            if is_exhausted:
                self._drop(group)
        return popped

    def can_queue(self, num_engines: int) -> bool:
        """Returns whether engines may pop samples before they have free slots, without others running out of work."""
        is_shared = self._share is None and not self._grows and self._has_unclaimed
        return is_shared and self._num_claimed + num_engines < len(self._fresh)

    def mark_done(self, samples: Sequence[int]) -> None:
        """Counts completed samples, with a filter when they are scored; KeyError for an id that is not in the queue."""
        # By group, in the order of their last samples.
        counts = Counter(reversed([self._group_of[sample] for sample in samples]))
        if self._filter:
            self._unscored += samples
            return
        complete = []
        for group, count in reversed(counts.items()):
            # The addition that returns the size has the last sample, so a group is counted once.
            if self._sizes[group] == count or self._add(f"done/{group}", count) == self._sizes[group]:
                complete.append(group)
        if complete:
            self._num_complete = self._add("complete", len(complete))
            first = self._num_complete - len(complete)
            self._completion_order |= {group: first + place for place, group in enumerate(complete)}

    def refresh(self) -> None:
        """Reads the counters upon which `is_done` and `can_queue` decide; starts candidates for rejected groups."""
        if self._filter is None:
            self._num_complete, self._num_claimed = self._read_counters("complete", "claimed")
            return
        unscored, self._unscored = self._unscored, []
        for sample in unscored:
            score = self._filter.score_of(sample)
            if score is None:
                self._unscored.append(sample)
            else:
                self._add_score(self._filter, sample, score)
        self._num_complete, self._num_rejected = self._read_counters("complete", "rejected")
        # The order of the candidates is fixed, so all ranks append the same groups, though not at the same time.
        self.append(self._candidates[len(self._fresh) : self._num_admitted])

    def is_done(self) -> bool:
        """Returns whether enough groups were complete at the last `refresh` or `mark_done`, on all engines together."""
        is_filtered = self._filter and self._num_complete + self._num_rejected >= len(self._candidates)
        return self._num_complete >= self._num_needed or bool(is_filtered)

    def is_exhausted(self) -> bool:
        """Returns whether `pop` returns no further sample to this engine, whatever others do."""
        if self._share is not None:
            return not self._share
        return not self._grows and not self._has_unclaimed and not self._remaining

    def count_end(self) -> int:
        """Returns how many engines have finished, this one included."""
        return self._add("engines finished", 1)

    def is_first_to_see(self, event: str) -> bool:
        """Returns whether this engine is the first one to see that an open queue is as far as expected."""
        return int(self._store.add(f"{self.key}/{event}", 1)) == 1

    def report(self) -> dict[str, Any]:
        """Returns what all ranks must know of a call in the end, as far as this rank knows it.

        `order`: pairs of a group that was completed here and the number of groups completed before; `rejected`: groups
        that the filter has rejected here; `scores`: of the groups that it has kept or rejected here; `started`: number
        of groups, from the first one on, that engines may start.
        """
        order = list(self._completion_order.items())
        return {"order": order, "rejected": self._rejected, "scores": self._scores, "started": len(self._fresh)}

    def forget(self, samples: Iterable[int]) -> None:
        """Removes the groups of samples that were returned or dropped from an open queue.

        Their counters are deleted at the next call: until then another rank may look at them.
        """
        for index in self._forgotten:
            for name in (f"{self.key}/done/{index}", f"{self.key}/popped/{index}"):
                if name in self._used_keys:
                    self._used_keys.remove(name)
                    self._store.delete_key(name)
        self._forgotten = sorted({self._group_of.pop(sample) for sample in samples if sample in self._group_of})
        for index in self._forgotten:
            self._fresh[index], self._sizes[index] = (), 0
        self._remaining = [index for index in self._remaining if index not in self._forgotten]
        if self._claimed in self._forgotten:
            self._claimed = None

    def delete_keys(self) -> None:
        """Deletes the counters that this rank has used; called when no rank reads them any more."""
        for name in self._used_keys:
            self._store.delete_key(name)

    @property
    def _num_admitted(self) -> int:
        if self._filter is None:
            return len(self._candidates)
        return self._num_needed + self._filter.num_extra + self._num_rejected

    def _current_group(self) -> int | None:
        while self._claimed is None and self._has_unclaimed:
            if self._next_claim is None:
                self._next_claim = self._add("claimed", 1) - 1
            if self._next_claim >= len(self._fresh):
                if not self._grows:
                    self._has_unclaimed = False
                    self._drop_exhausted()
                break
            claimed, self._next_claim = self._next_claim, None
            self._claimed = claimed if claimed in self._remaining else None
        if self._claimed is not None:
            return self._claimed
        return self._remaining[-1] if self._remaining else None

    def _pop_from(self, group: int, count: int) -> tuple[list[int], bool]:
        """Returns samples of a group, and whether none is left."""
        fresh = self._fresh[group]
        if self._only_claimer_starts(group):
            return list(fresh), True
        end = self._add(f"popped/{group}", count)  # the samples in front of `end` are this engine's, if they exist
        return list(fresh[end - count : end]), end >= len(fresh)

    def _only_claimer_starts(self, group: int) -> bool:
        """Returns whether the engine that claims a group starts all of it: a single sample, which needs no counter."""
        # Where groups are appended, an engine may have to wait with one that it has claimed, while others have slots.
        return len(self._fresh[group]) == 1 and not self._grows  # others help only when all groups are claimed

    def _drop_exhausted(self) -> None:
        # Forgets the groups without a sample left: one request instead of one for each of them from each engine.
        self._remaining = [group for group in self._remaining if not self._only_claimer_starts(group)]
        # The store answers when all counters exist: an engine adds to one right after its claim.
        popped = self._read(f"popped/{group}" for group in self._remaining) if self._remaining else []
        pairs = zip(self._remaining, popped, strict=True)
        self._remaining = [group for group, count in pairs if count < len(self._fresh[group])]

    def _drop(self, group: int) -> None:
        self._remaining.remove(group)
        if group == self._claimed:
            self._claimed = None

    def _add_score(self, score_filter: ScoreFilter, sample: int, score: Mapping[str, float]) -> None:
        group, key = self._group_of[sample], f"{self.key}/score/"
        ids = self._candidates[group].ids
        self._used_keys.add(key + str(sample))
        # Written before it is counted: the rank that counts the last score reads all of them.
        self._store.set(key + str(sample), json.dumps(score))
        if self._add(f"scored/{group}", 1) < len(ids):
            return
        scores = [json.loads(value) for value in self._store.multi_get([key + str(i) for i in ids])]
        self._scores += [score for of_sample in scores for score in of_sample.values()]
        if keeps(score_filter.keep, scores):
            self._completion_order[group] = self._add("complete", 1) - 1
        else:
            self._add("rejected", 1)
            self._rejected.append(group)

    def _read_counters(self, *names: str) -> list[int]:
        """Returns counters in one request, also before the first addition to them."""
        for name in names:
            if f"{self.key}/{name}" not in self._used_keys:
                self._add(name, 0)  # a counter exists from the first addition on
        return self._read(names)

    def _read(self, names: Iterable[str]) -> list[int]:
        return [int(value) for value in self._store.multi_get([f"{self.key}/{name}" for name in names])]

    def _add(self, name: str, count: int) -> int:
        key = f"{self.key}/{name}"
        self._used_keys.add(key)
        return int(self._store.add(key, count))
