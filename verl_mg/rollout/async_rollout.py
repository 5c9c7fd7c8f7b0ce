"""Asynchronous rollout: engines on separate ranks generate without pause while the recipe trains.

    main thread of every rank                           thread of each rank that leads an engine (`EngineStream`)
    generate        submits groups, also of later calls ──▶ starts samples while its engine has free slots
                    waits for an event in the store     ◀── stores, scores and counts complete samples
                    returns the oldest complete groups  ◀── buffer of complete samples
    training                                                continues
    update_weights  stops the thread between two steps, pauses the engines between two tokens, transfers, continues
    evaluation      stops the thread, aborts the samples in flight, and submits them again afterwards; a checkpoint too

    group:  SUBMITTED ──▶ COMPLETE ──▶ RETURNED
                └─────────────┴──────▶ DROPPED    too old with rollout.stale=drop, or rejected by a filter (complete
                                                  groups only); a newly drawn prompt is submitted in its place

`generate` submits as many groups of later calls as the bound of staleness permits, see `staleness`. Requests in flight
continue under new weights, and each token keeps the version that generated it. The bookkeeping of groups is the same on
every rank; a checkpoint does not interrupt agents, which cannot continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import PrefixStore

from verl_mg.batch import Batch
from verl_mg.data.prompt_feed import PromptFeed
from verl_mg.data.prompts import Prompt
from verl_mg.distributed.collectives import all_gather_json, sum_over_ranks
from verl_mg.engines.engine import Request, Sample, Sampling, count_metrics
from verl_mg.errors import UserError
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor
from verl_mg.roles.reward import RewardRole, scoring_reward
from verl_mg.rollout.engine_group import InFlightEngineGroup
from verl_mg.rollout.engine_stream import EngineStream, oldest_version
from verl_mg.rollout.filtered_queue import GroupFilter
from verl_mg.rollout.group_rows import distribute_rows, group_rows, sample_seed
from verl_mg.rollout.pending_groups import PendingGroup, RolloutState
from verl_mg.rollout.rollout import Rollout
from verl_mg.rollout.rollout_source import LocalRolloutState, RolloutSource, filter_metrics
from verl_mg.rollout.staleness import OutstandingGroups, PolicyVersions, Selection, Stale
from verl_mg.rollout.work_queue import StreamingWorkQueue
from verl_mg.rows.records import GeneratedRows, RolloutRecords


class AsyncRollout(RolloutSource):
    """Generates samples on the engines of all ranks without pause; all ranks call every method together."""

    def __init__(
        self,
        engines: InFlightEngineGroup,
        sampling: Sampling,
        seed: int,
        context: JobContext,
        prompts: PromptFeed,
        records: RolloutRecords,
        reward: RewardRole | None = None,
        *,
        max_staleness: int,
        stale: Stale,
        routed_shape: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(records)
        self._engines, self._seed, self._context, self._feed, self._reward = engines, seed, context, prompts, reward
        self._versions = PolicyVersions(max_staleness)
        self._groups = OutstandingGroups(self._versions, stale)
        self._routed_shape = routed_shape
        self._store = PrefixStore("async rollout", context.store)
        self._prompt_of: dict[int, Prompt] = {}
        """Prompt of each sample of the outstanding groups; read by the stream's thread."""
        self._score_ids: dict[int, int] = {}
        """Score of each complete sample of this rank; written by the stream's thread."""
        self._loaded: dict[int, Sample] = {}
        """Complete samples of a checkpoint on this rank."""
        self._loaded_groups: set[int] = set()
        """First samples of the groups that were complete in the checkpoint, which no engine completes."""
        self._ahead: list[int] = []
        """Prompts that were submitted for later calls, in order."""
        self._num_samples = 0
        self._num_calls = self._num_consumed = self._num_dropped = 0
        self._progress: list[PendingGroup] = []  # `local_state` sets it for `state`: both describe one moment
        self._idle_since = time.perf_counter()
        queue = StreamingWorkQueue(self._store, "queue")
        self._stream = EngineStream(
            engines.engine,
            queue,
            self._store,
            engines.events,
            engines.restart_process,
            engines.resume_requests,
            self._request_of,
            self._on_sample,
            sampling,
        )
        # Evaluations are calls that end, on the same engines while the stream is stopped.
        self._evaluation = Rollout(
            engines, sampling, seed, context, prompts, records, reward, routed_shape=routed_shape
        )

    def generate(self, prompts: Sequence[Prompt], num_samples: int = 1) -> Batch:
        """Returns as many groups as prompts, by their oldest tokens; UserError for prompts not submitted in advance."""
        # The batch has the columns of `Rollout.generate`; tokens that are too old are not in `loss_mask`.
        self._context.executor.require_outside_block("rollout.generate")
        # Prompts of later calls too, before this call waits: engines must not run out of work at its end.
        self._submit(prompts, num_samples)
        with self._context.timer("generate"):
            selection = self._wait_for_groups(len(prompts))
        with self._context.timer("row_dispatch"):
            rows = self._assemble(selection.returned)
        self._measure(rows.batch)
        self._train_batches.append(rows.batch)
        self._records.add(rows)
        return rows.batch

    def generate_filtered(self, num_groups: int, num_samples: int, keep: GroupFilter, max_groups: int) -> Batch:
        """Returns groups that a filter keeps; a group is filtered, and replaced, when it would be returned."""
        self._context.executor.require_outside_block("rollout.generate_filtered")
        reward = scoring_reward(self._reward)
        self._submit(self._feed.next_batch(num_groups), num_samples)
        kept: list[PendingGroup] = []
        all_scores: list[float] = []
        num_rejected, idle = 0, 0.0
        with self._context.timer("generate"):
            # Consumes complete groups; waits for engines and for scores; ends with `num_groups` kept or `max_groups`
            # filtered groups. Engines have groups of later calls meanwhile, so they do not wait for a score.
            while missing := min(num_groups - len(kept), max_groups - len(kept) - num_rejected):
                returned = self._wait_for_groups(missing).returned
                idle += self.metrics["time/trainer_idle"]
                scores = self._scores_of(returned, reward)
                all_scores += scores.values()
                rejected = [group for group in returned if not keep([scores[i] for i in group.ids])]
                kept += [group for group in returned if group not in rejected]
                num_rejected += len(rejected)
                self._drop(rejected)
        with self._context.timer("row_dispatch"):
            # They were kept in several rounds, and `distribute_rows` needs the order of their ids.
            rows = self._assemble(sorted(kept, key=lambda group: group.ids.start))
        self._measure(rows.batch)
        self.metrics |= {**filter_metrics(num_rejected, all_scores), "time/trainer_idle": idle}
        self._train_batches.append(rows.batch)
        self._records.add(rows)
        return rows.batch

    def generate_greedy(self, prompts: Sequence[Prompt]) -> Batch:
        """Returns the greedy response to each prompt; see `generate_for_eval`."""
        return self.generate_for_eval(prompts, 1, temperature=0.0)

    def generate_for_eval(self, prompts: Sequence[Prompt], num_samples: int, **sampling: Any) -> Batch:
        """Returns samples with the columns of `generate`; training samples wait meanwhile."""
        with self._drained():
            return self._evaluation.generate_for_eval(prompts, num_samples, **sampling)

    def update_weights(self, actor: Actor) -> None:
        """Transfers the actor's weights to the engines between two tokens of the requests in flight."""
        self._context.executor.require_outside_block("rollout.update_weights")
        with self._context.timer("weight_sync"), self._stream.stopped():
            self._restarted_engines()  # they get the weights with all others
            self.metrics |= self._engines.update_weights_in_flight(actor)
            self._versions.push(actor.num_updates)
            self._stream.set_version(actor.num_updates)
            if self._groups.stale == "drop":
                self._drop_stale(self._groups.drop_unfinished(self._all_in_flight()))
        self._stream.start()  # only the first time: before, the engines had no weights

    def close(self) -> None:
        """Ends the thread and the engines that this job has started."""
        self._stream.close()
        self._engines.close()

    # -- checkpoints

    def local_state(self) -> LocalRolloutState:
        """Returns the complete samples that this rank has, and its unfinished ones, which continue afterwards."""
        with self._stream.stopped():
            completed, partial = self._stream.snapshot()
            completed |= self._loaded
            reports = all_gather_json([list(completed), list(partial)])
            done, aborted = ([i for report in reports for i in report[which]] for which in (0, 1))
            self._progress = self._groups.progress(done, aborted)
            self._stream.resubmit()
        return LocalRolloutState(completed, partial)

    def state(self) -> RolloutState:
        """Returns what all ranks know of the samples at the last `local_state`."""
        return RolloutState(
            next_id=self._groups.next_id,
            groups=[group.state() for group in self._progress],
            in_flight=None,
            prefetched=self._ahead,
            prefetched_samples=self._num_samples if self._ahead else 0,
            versions=self._versions.recent,
        )

    def load(self, state: RolloutState, local: LocalRolloutState, prompt_of: Callable[[int], Prompt]) -> None:
        """Resumes from a checkpoint; unfinished samples continue, complete ones are scored again."""
        # Only a rank with an engine can continue samples; a resumed job may have engines on other ranks.
        partial = local.partial if self._engines.engine is not None else {}
        reports = all_gather_json([list(local.completed), list(partial)])
        done, aborted = ({i for report in reports for i in report[which]} for which in (0, 1))
        groups = [PendingGroup.from_state(group, prompt_of, done, aborted) for group in state.groups]
        self._groups.next_id, self._groups.groups = state.next_id, {group.ids.start: group for group in groups}
        self._prompt_of = {i: group.prompt for group in groups for i in group.ids}
        known = {i for group in groups for i in group.done}
        self._loaded = {i: sample for i, sample in local.completed.items() if i in known}
        self._stream.resume_partial(
            self._request(i, partial[i]) for group in groups for i in sorted(group.partial & partial.keys())
        )
        self._ahead, self._num_samples = list(state.prefetched), state.prefetched_samples
        self._versions.recent = list(state.versions)
        self._loaded_groups = {group.ids.start for group in groups if not group.missing.size}
        self._stream.append(group.missing for group in groups if group.missing.size)
        for sample in self._loaded.values():
            self._score(sample)

    def resume_in_flight(self) -> None:
        """Does nothing: the groups of the checkpoint are generated from the first `update_weights` on."""

    # -- called by the stream's thread

    def _request_of(self, sample: int) -> Request:
        return self._request(sample, None)

    def _request(self, sample: int, partial: Sample | None) -> Request:
        prompt = self._prompt_of[sample]
        return Request(sample, prompt.tokens, sample_seed(self._seed, sample), partial, prompt, prompt.load_images())

    def _on_sample(self, sample: Sample) -> None:
        self._context.timer.progress += 1  # the watchdog sees that a long call progresses
        self._score(sample)

    def _score(self, sample: Sample) -> None:
        if self._reward:
            self._score_ids[sample.id] = self._reward.submit(self._prompt_of[sample.id], sample)

    # -- one call

    def _submit(self, prompts: Sequence[Prompt], num_samples: int) -> None:
        """Submits the prompts of this call that were not submitted in advance, and prompts of later calls."""
        requested = [prompt.id for prompt in prompts]
        known = self._ahead[: len(requested)]
        if known != requested[: len(known)] or (known and num_samples != self._num_samples):
            raise UserError(
                f"rollout.mode=async: {self._num_samples} samples of each of {len(self._ahead)} prompts are generated "
                f"in advance, but the recipe requests {num_samples} of {len(prompts)} other prompts. Request the "
                "prompts of job.prompts.next_batch(n) with the same number of samples each time, or write "
                "rollout.mode=sync."
            )
        new, self._ahead, self._num_samples = list(prompts[len(known) :]), self._ahead[len(known) :], num_samples
        if prompts and not self._is_last:
            self._groups.adapt(self._all_complete(), len(prompts))
            # Peeked, not drawn: the recipe draws these prompts with its later calls of `next_batch`. Prompts that were
            # submitted stay submitted, also where fewer would be now.
            later = self._feed.peek(max(len(self._ahead), self._groups.num_ahead(len(prompts))))
            new += later[len(self._ahead) :]
            self._ahead = [prompt.id for prompt in later]
        self._admit(new)

    def _admit(self, prompts: Sequence[Prompt]) -> None:
        groups = self._groups.admit(prompts, self._num_samples)
        self._prompt_of |= {i: group.prompt for group in groups for i in group.ids}
        self._stream.append(group.missing for group in groups)

    def _wait_for_groups(self, count: int) -> Selection:
        """Waits until `count` groups can be returned, and removes them from the buffer."""
        count = min(count, len(self._groups.groups))
        returned: list[PendingGroup] = []
        started = time.perf_counter()
        # Consumes complete groups of all ranks, waits in `_wait_for_completions`, and ends with `count` groups.
        # All ranks make the same passes, since `_all_complete` is a collective with one result.
        while len(returned) < count:
            selection = self._groups.select(self._all_complete(), count - len(returned))
            for group in (*selection.dropped, *selection.returned):
                # Groups that were complete in the checkpoint are missing in the queue's count of complete groups.
                self._num_consumed += group.ids.start not in self._loaded_groups
            self._drop_stale(selection.dropped)
            returned += selection.returned
            if len(returned) < count and not selection.dropped:
                self._wait_for_completions(count - len(returned))
        self.metrics["time/trainer_idle"] = time.perf_counter() - started
        return Selection(sorted(returned, key=lambda group: group.ids.start), [])

    def _wait_for_completions(self, count: int) -> None:
        """Waits until engines have completed `count` more groups than were removed from the buffer."""
        self._num_calls += 1
        key, events = f"call {self._num_calls}", self._engines.events
        self._stream.announce(key, self._num_consumed + count)
        # Consumes the events of the job's store. Woken by the engine whose sample completes the count, by a restarted
        # engine that needs weights, and by the error of a stream, which `check` raises on its rank.
        while not events.has_ended(key):
            for engine in events.wait():
                self._engines.recover(engine)
            self._stream.check()

    def _all_complete(self) -> dict[int, int]:
        """Returns the version of the oldest token of each complete sample of all ranks."""
        local = self._stream.oldest_versions()
        local |= {i: oldest_version(sample, self._versions.newest) for i, sample in self._loaded.items()}
        return {i: version for report in all_gather_json(list(local.items())) for i, version in report}

    def _all_in_flight(self) -> list[tuple[int, int]]:
        local = list(self._stream.in_flight_versions().items())
        return [(i, version) for report in all_gather_json(local) for i, version in report]

    def _scores_of(self, groups: Sequence[PendingGroup], reward: RewardRole) -> dict[int, float]:
        """Waits for the scores of complete groups on this rank, and returns the scores of all ranks by sample."""
        complete = [i for group in groups for i in group.ids if i in self._score_ids]
        local = [(i, reward.score(self._score_ids[i])) for i in complete]
        return {i: score for report in all_gather_json(local) for i, score in report}

    def _drop_stale(self, groups: Sequence[PendingGroup]) -> None:
        self._num_dropped += sum(len(group.ids) for group in groups)
        self._drop(groups)

    def _drop(self, groups: Sequence[PendingGroup]) -> None:
        """Drops groups, and submits newly drawn prompts in their place."""
        if not groups:
            return
        ids = [i for group in groups for i in group.ids]
        with self._stream.stopped():
            self._stream.discard(ids)
        self._remove(ids)  # after `discard`, since the thread reads `_prompt_of`
        self._admit(self._feed.draw_extra(len(groups)))

    def _assemble(self, groups: Sequence[PendingGroup]) -> GeneratedRows:
        ids = [i for group in groups for i in group.ids]
        completed = self._stream.take(ids)
        completed |= {i: sample for i, sample in self._loaded.items() if i in set(ids)}
        score_ids = self._score_ids if self._reward else None
        rows = group_rows(groups, completed, score_ids, self._engines.version, self._routed_shape)
        self._remove(ids, discard_scores=False)  # `RewardRole.wait` collects them
        rows = distribute_rows(rows, groups, self._context.rows)
        batch = rows.batch
        # Counting groups does not bound samples that take longer than `max_staleness` updates; this does, per token.
        too_old = batch["loss_mask"] & (batch["policy_versions"] < self._versions.oldest_allowed)
        batch["loss_mask"] = batch["loss_mask"] & ~too_old
        return rows

    def _remove(self, ids: Sequence[int], *, discard_scores: bool = True) -> None:
        scores = [self._score_ids.pop(i) for i in ids if i in self._score_ids]
        if self._reward and discard_scores:
            self._reward.discard(scores)
        for i in ids:
            self._prompt_of.pop(i, None)
            self._loaded.pop(i, None)

    @contextmanager
    def _drained(self) -> Iterator[None]:
        """Aborts the samples in flight for the time of the block, which uses the engines; they continue after it."""
        with self._stream.stopped():
            self._stream.drain()
            for engine in self._restarted_engines():  # the block uses all engines, and these have no weights
                self._engines.recover(engine)
            yield
            self._stream.resubmit()

    def _restarted_engines(self) -> list[int]:
        """Returns the engines that have no weights since they were restarted; called while all streams are stopped."""
        all_gather_json(None)  # then all have announced their restarts
        return list(self._engines.events.unseen_restarts())

    def _measure(self, batch: Batch) -> None:
        """Sets the metrics of a call: ages of the trained tokens, fill of the buffer, idle engines, dropped samples."""
        now = time.perf_counter()
        versions, mask = batch["policy_versions"], batch["loss_mask"]
        ages = torch.tensor([self._versions.age(version) for version in versions[mask].tolist()], dtype=torch.int64)
        counts = torch.bincount(ages, minlength=self._versions.max_staleness + 1).tolist()
        masked = int(((versions >= 0) & ~mask).sum())
        idle, self._stream.idle_seconds = self._stream.idle_seconds, 0.0
        num_tokens, self._stream.num_tokens = self._stream.num_tokens, 0
        local = {f"age {age}": float(count) for age, count in enumerate(counts)}
        local |= {"too_old": float(masked), "idle": idle, "tokens": float(num_tokens)}
        local |= {"deaths": float(self._stream.num_deaths), "buffered": float(len(self._stream.oldest_versions()))}
        local |= self._engines.engine.take_counts() if self._engines.engine else {}
        sums = sum_over_ranks([local])
        trained = max(sum(sums.get(f"age {age}", 0.0) for age in range(len(counts))), 1.0)
        outstanding = sum(len(group.ids) for group in self._groups.groups.values())
        self.metrics |= {
            **{f"rollout/staleness_{age}": sums.get(f"age {age}", 0.0) / trained for age in range(len(counts))},
            "rollout/tokens_too_old": sums["too_old"],
            "rollout/buffer_fill": sums["buffered"] / max(outstanding, 1),
            "rollout/dropped_samples": float(self._num_dropped),
            "rollout/engine_deaths": sums["deaths"],
            "time/engine_idle": sums["idle"] / (self._engines.num_engines * (now - self._idle_since)),
            **count_metrics([sums]),
        }
        self._num_dropped, self._idle_since = 0, now
