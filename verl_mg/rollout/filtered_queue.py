"""Work queue of a call that returns groups whose scores a filter keeps; a rejected group is replaced immediately.

    sample complete                 waits for its score on the rank that generated it
    score there, at a `refresh`     score and number of scores of the group ──▶ store
    last score of a group           the rank that adds it reads all of them, and keeps or rejects the group
    group rejected                  on each rank, at its next `refresh`, one more candidate can be started

Candidates are started in order, and a group is replaced only when it is rejected: without extra groups the call returns
the first groups in the order of the candidates that the filter keeps, whatever the speed of engines and of rewards.

Two groups are needed of the candidates 0, 1 and 2, whose samples are (0, 1), (2, 3), (4, 5); different scores are kept:

    started 0, 1    scores (1, 1): group 0 is rejected, 2 is started;  (0, 1): group 1 is kept
    started 2       scores (1, 0): group 2 is kept;  done: completion_order {1: 0, 2: 1}, rejected {0}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.distributed import Store

from verl_mg.rollout.work_queue import Group, StreamingWorkQueue

# Whether a group is kept, from the scores of its samples in the order of their ids.
GroupFilter = Callable[[Sequence[float]], bool]


class FilteredWorkQueue(StreamingWorkQueue):
    """Queue of candidates: one more is started for each that was rejected.

    `candidates` are the missing samples of each group, `samples` the ids of all of its samples. `score_of` returns None
    while a sample is not scored. `num_extra` groups are started beyond the needed ones.
    """

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
        """Keeps a complete sample of this rank until it is scored; only then it counts."""
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
        # Written before it is counted: the rank that counts the last score reads all of them.
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
        # The order of the candidates is fixed, so all ranks append the same groups, though not at the same time.
        admitted = self._num_groups_needed + self._num_extra + self._num_rejected
        self.append(self._candidates[self.num_admitted : admitted])
