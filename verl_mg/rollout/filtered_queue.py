"""Work queue of a call that returns groups whose scores a filter keeps; a rejected group is replaced at once.

    sample complete                 waits for its score on the rank that generated it
    score there, at a `refresh`     score and number of scores of the group ──▶ store
    last score of a group           the rank that adds it reads all of them, and keeps or rejects the group
    group rejected                  on each rank, at its next `refresh`, one more candidate can be started

Candidates are started in order, and a group is replaced only when it is rejected: without extra groups the call returns
the first groups in the order of the candidates that the filter keeps, whatever the speed of engines and of rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.distributed import Store

from verl_mg.rollout.work_queue import Group, StreamingWorkQueue

GroupFilter = Callable[[Sequence[float]], bool]
"""Whether a group is kept, from the scores of its samples in the order of their ids."""


class FilteredWorkQueue(StreamingWorkQueue):
    """Queue of candidates, of which as many are started as are needed after those that were rejected."""

    def __init__(
        self,
        store: Store,
        key: str,
        candidates: Sequence[Group],
        samples: Sequence[range],
        num_groups_needed: int,
        num_extra: int,
        score_of: Callable[[int], float | None],
        keep: GroupFilter,
    ) -> None:
        super().__init__(store, key, num_groups_needed)
        self._candidates, self._num_extra, self._score_of, self._keep = candidates, num_extra, score_of, keep
        self._samples = samples
        self._group_of_sample = {i: g for g, ids in enumerate(samples) for i in ids}
        self._unscored: list[int] = []
        self._num_rejected = 0
        self._append_admitted()

    def mark_done(self, sample: int) -> None:
        """Takes a complete sample of this rank, which counts as soon as it is scored."""
        self._unscored.append(sample)

    def refresh(self) -> None:
        """Counts the samples that have been scored, reads the counters, and appends candidates for rejected groups."""
        unscored, self._unscored = self._unscored, []
        for sample in unscored:
            score = self._score_of(sample)
            if score is None:
                self._unscored.append(sample)
            else:
                self._add_score(self._group_of_sample[sample], sample, score)
        self._num_complete, self._num_claimed, self._num_rejected = self._read_counters(
            "complete", "claimed", "rejected"
        )
        self._append_admitted()

    def is_done(self) -> bool:
        """Returns whether enough groups were kept at the last `refresh`, or all candidates were filtered."""
        return super().is_done() or self._num_complete + self._num_rejected >= len(self._candidates)

    def _add_score(self, group: int, sample: int, score: float) -> None:
        key = f"{self._key}/score/{sample}"
        self._used_keys.add(key)
        self._store.set(key, repr(score))
        if self._add(f"scored/{group}", 1) < len(self._samples[group]):
            return
        keys = [f"{self._key}/score/{i}" for i in self._samples[group]]
        scores = [float(value) for value in self._store.multi_get(keys)]
        self.filtered_scores += scores
        if self._keep(scores):
            self.completion_order[group] = self._add("complete", 1) - 1
        else:
            self._add("rejected", 1)
            self.rejected.add(group)

    def _append_admitted(self) -> None:
        admitted = self._num_groups_needed + self._num_extra + self._num_rejected
        self.append(self._candidates[self.num_admitted : admitted])
