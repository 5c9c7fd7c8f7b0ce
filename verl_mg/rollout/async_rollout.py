"""Asynchronous rollout: engines on separate ranks generate without pause while the recipe trains.

    main thread of every rank                           thread of each rank that leads an engine (`EngineWorker`)
    generate        submits groups, also of later calls ──▶ starts samples while its engine has free slots
                    waits for an event in the store     ◀── stores, scores and counts complete samples
                    returns the oldest complete groups  ◀── buffer of complete samples
    training                                                continues
    update_weights  stops the thread between two steps, pauses the engines between two tokens, transfers, continues
    evaluation      adds a call, which gets free slots first ──▶ starts its samples, and training's
                    waits for the call's end            ◀── no request is aborted
    checkpoint      stops the thread, aborts the samples in flight, and lets them continue

`generate` submits as many groups of later calls as training needs and the bound of staleness permits, an evaluation as
many as the bound permits, see `StalenessBound`. Requests in flight continue under new weights, and each token keeps the
version that generated it. The update waits for the evaluation, so that its samples are of one version; a restarted
engine begins them again. A checkpoint does not interrupt agents, which cannot continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl_mg.batch import Batch
from verl_mg.data.prompts import Prompt
from verl_mg.distributed.collectives import all_gather_json, sum_over_ranks
from verl_mg.engines.engine import count_metrics
from verl_mg.errors import UserError
from verl_mg.roles.models import Actor
from verl_mg.roles.reward import RewardRole, scoring_reward
from verl_mg.rollout.engine_group import InFlightEngineGroup
from verl_mg.rollout.groups import Group, GroupState, RolloutState, StalenessBound
from verl_mg.rollout.rollout import LocalRolloutState, Rollout, RolloutSetup
from verl_mg.rollout.work_queue import GroupFilter, WorkQueue, filter_metrics, keeps


class AsyncRollout(Rollout):
    """Generates samples on the engines of all ranks without pause."""

    def __init__(self, engines: InFlightEngineGroup, setup: RolloutSetup, bound: StalenessBound) -> None:
        super().__init__(engines, setup)
        self._in_flight_engines, self._bound = engines, bound
        self._num_prompts = self._num_waits = self._num_consumed = self._num_dropped = 0
        self._idle_since = time.perf_counter()
        self._queue = WorkQueue(self._store, "queue", self._sampling, is_open=True)
        self._worker.add(self._queue)

    def generate(self, prompts: Sequence[Prompt], num_samples: int = 1) -> Batch:
        """Returns as many groups as prompts, by their oldest tokens; tokens that are too old are not in `loss_mask`."""
        self._context.executor.require_outside_block("rollout.generate")
        # Prompts of later calls too, before this call waits: engines must not run out of work at its end.
        self._submit(prompts, num_samples)
        with self._context.timer("generate"):
            groups, idle = self._take_oldest(len(prompts))
        return self._return_groups(groups, idle)

    def generate_filtered(self, num_groups: int, num_samples: int, keep: GroupFilter, max_groups: int) -> Batch:
        """Returns groups that a filter keeps; a group is filtered, and replaced, when it would be returned."""
        self._context.executor.require_outside_block("rollout.generate_filtered")
        reward = scoring_reward(self._reward)
        self._submit(self._feed.next_batch(num_groups), num_samples)
        kept: list[Group] = []
        all_scores: list[float] = []
        num_rejected, idle = 0, 0.0
        with self._context.timer("generate"):
            # Consumes complete groups; waits for engines and for scores; ends with `num_groups` kept or `max_groups`
            # filtered groups. Engines have groups of later calls meanwhile, so they do not wait for a score.
            while missing := min(num_groups - len(kept), max_groups - len(kept) - num_rejected):
                complete, seconds = self._take_oldest(missing)
                idle += seconds
                scores = self._scores_of(complete, reward)
                all_scores += [score for of_sample in scores.values() for score in of_sample.values()]
                rejected = [group for group in complete if not keeps(keep, [scores[i] for i in group.ids])]
                kept += [group for group in complete if group not in rejected]
                num_rejected += len(rejected)
                self._replace(rejected)
        # They were kept in several rounds, and `distribute_rows` needs the order of their ids.
        batch = self._return_groups(sorted(kept, key=lambda group: group.ids.start), idle)
        self.metrics |= filter_metrics(num_rejected, all_scores)
        return batch

    def generate_for_eval(self, prompts: Sequence[Prompt], num_samples: int, **sampling: Any) -> Batch:
        """Returns samples of an evaluation; engines work as far ahead as the bound of staleness permits meanwhile."""
        # Training does not submit groups while it waits, and slots that the evaluation does not need would be empty.
        if not self._is_last:
            self._submit_ahead(self._bound.largest(self._num_prompts))
        return super().generate_for_eval(prompts, num_samples, **sampling)

    def update_weights(self, actor: Actor) -> None:
        """Transfers the actor's weights to the engines between two tokens of the requests in flight."""
        self._context.executor.require_outside_block("rollout.update_weights")
        with self._context.timer("weight_sync"), self._worker.stopped():
            all_gather_json(None)  # then all have announced their restarts, and these engines get the weights too
            restarted = list(self._engines.events.unseen_restarts())
            self.metrics |= self._in_flight_engines.update_weights_in_flight(actor)
            for engine in restarted:
                self._worker.weights_arrived(engine)
            self._bound.push(actor.num_updates)
            self._worker.version = actor.num_updates
            if self._bound.stale == "drop":
                in_flight = [entry for report in all_gather_json(self._worker.in_flight_versions()) for entry in report]
                self._drop_stale(self._bound.too_old(self._groups.training, in_flight))

    # -- checkpoints

    def local_state(self) -> LocalRolloutState:
        """Returns the complete samples that this rank has, and its unfinished ones, which continue afterwards."""
        with self._worker.stopped():
            self._worker.interrupt()
            state = LocalRolloutState(dict(self._groups.completed), dict(self._groups.partial))
            reports = all_gather_json([list(state.completed), list(state.partial)])
            self._groups.update(
                self._groups.training, *({i for report in reports for i in report[which]} for which in (0, 1))
            )
        return state

    def state(self) -> RolloutState:
        """Returns what all ranks know of the samples at the last `local_state`."""
        return self._state(versions=self._bound.recent)

    def _load(self, state: RolloutState, local: LocalRolloutState, prompt_of: Callable[[int], Prompt]) -> None:
        """Resumes from a checkpoint; unfinished samples continue from the first update on, others are scored again."""
        super()._load(state, local, prompt_of)
        self._bound.recent = list(state.versions)
        queued = [group for group in self._groups.training if group.num_missing]
        # Groups that were complete in the checkpoint are missing in the queue's count of complete groups.
        self._num_consumed = len(queued) - len(self._groups.training)
        self._append(queued)

    def start_generating(self) -> None:
        """Starts the worker, once: until now the engines had no weights, or a row for a check."""
        self._worker.start()

    # -- one call

    @property
    def _first_evaluation_number(self) -> int:
        return 0  # ids of training depend on the speed of engines here

    def _submit(self, prompts: Sequence[Prompt], num_samples: int) -> None:
        """Submits the prompts of this call that were not submitted in advance, and prompts of later calls."""
        requested = [prompt.id for prompt in prompts]
        known = self._ahead[: len(requested)]
        if known != requested[: len(known)] or (known and num_samples != self._num_samples_ahead):
            raise UserError(
                f"rollout.mode=async: {self._num_samples_ahead} samples of each of {len(self._ahead)} prompts are "
                f"generated in advance, but the recipe requests {num_samples} of {len(prompts)} other prompts. Request "
                "the prompts of job.prompts.next_batch(n) with the same number of samples each time, or write "
                "rollout.mode=sync."
            )
        self._ahead, self._num_samples_ahead = self._ahead[len(known) :], num_samples
        self._append(self._groups.add(prompts[len(known) :], num_samples))
        if prompts and not self._is_last:
            self._num_prompts = len(prompts)
            self._all_complete()
            if self._setup.longest:
                self._bound.num_runnable = -(-sum(all_gather_json(self._worker.num_slots)) // num_samples)
            self._bound.adapt(sum(g.state is GroupState.COMPLETE for g in self._groups.training), len(prompts))
            self._submit_ahead(self._bound.num_ahead(len(prompts)))

    def _submit_ahead(self, count: int) -> None:
        """Submits prompts of later calls until there are `count` of them."""
        # Peeked, not drawn: the recipe draws these prompts with its later calls of `next_batch`. Prompts that were
        # submitted stay submitted, also where fewer would be now.
        later = self._feed.peek(max(len(self._ahead), count))
        self._append(self._groups.add(later[len(self._ahead) :], self._num_samples_ahead))
        self._ahead = [prompt.id for prompt in later]

    def _append(self, groups: Sequence[Group]) -> None:
        for group in groups:
            group.state = GroupState.RUNNING
        self._worker.append(self._queue, groups, self._resumed(groups))

    def _take_oldest(self, count: int) -> tuple[list[Group], float]:
        """Waits until `count` groups can be returned; returns them, and the seconds of the wait."""
        # Groups that a filter has seen in this call are not taken again.
        count = min(count, sum(group.state is not GroupState.SCORED for group in self._groups.training))
        taken: list[Group] = []
        started = time.perf_counter()
        # Consumes complete groups of all ranks, waits for the queue, and ends with `count` groups. All ranks make the
        # same passes, since `_all_complete` is a collective with one result.
        while len(taken) < count:
            oldest = self._all_complete()
            left = [g for g in self._groups.training if g.state is not GroupState.SCORED and g not in taken]
            chosen, dropped = self._bound.select(left, oldest, count - len(taken))
            self._num_consumed += len(chosen) + len(dropped)
            self._drop_stale(dropped)
            taken += chosen
            if len(taken) < count and not dropped:
                # Nothing complete is left in the buffer, so the queue must complete more than were taken from it.
                self._num_waits += 1
                event = f"wait/{self._num_waits}"
                self._worker.expect(self._queue, self._num_consumed + count - len(taken), event)
                self._wait(event)
        return sorted(taken, key=lambda group: group.ids.start), time.perf_counter() - started

    def _all_complete(self) -> dict[int, int]:
        """Returns the version of the oldest token of each complete sample of all ranks, and updates the groups."""
        with self._worker.stopped():
            completed = list(self._groups.completed.values())
        local = [(sample.id, min(sample.generated_versions, default=self._bound.newest)) for sample in completed]
        oldest = {i: version for report in all_gather_json(local) for i, version in report}
        for group in self._groups.training:
            if group.state is GroupState.RUNNING and all(i in oldest for i in group.ids):
                group.state = GroupState.COMPLETE
        return oldest

    def _scores_of(self, groups: Sequence[Group], reward: RewardRole) -> dict[int, dict[str, float]]:
        """Waits for the scores of complete groups on this rank; returns all ranks' by sample and agent."""
        score_ids = {i: self._groups.score_ids.get(i) for group in groups for i in group.ids}
        local = [(i, reward.scores(score_id)) for i, score_id in score_ids.items() if score_id is not None]
        for group in groups:
            group.state = GroupState.SCORED
        return {i: score for report in all_gather_json(local) for i, score in report}

    def _drop_stale(self, groups: Sequence[Group]) -> None:
        self._num_dropped += sum(len(group.ids) for group in groups)
        self._replace(groups)

    def _replace(self, groups: Sequence[Group]) -> None:
        """Drops groups, and submits newly drawn prompts in their place."""
        if not groups:
            return
        ids = [i for group in groups for i in group.ids]
        with self._worker.stopped():
            self._worker.discard(ids)
            self._queue.forget(ids)
            self._drop(groups)
        self._append(self._groups.add(self._feed.draw_extra(len(groups)), self._num_samples_ahead))

    def _return_groups(self, groups: Sequence[Group], idle: float) -> Batch:
        """Returns the rows of complete groups, after `idle` seconds of waiting for them."""
        with self._context.timer("row_dispatch"):
            with self._worker.stopped():
                self._queue.forget([i for group in groups for i in group.ids])
            rows = self._assemble(groups, self._sampling)
            batch = rows.batch
            # Counting groups does not bound samples that take longer than `max_staleness` updates; this does, per
            # token.
            too_old = batch["loss_mask"] & (batch["policy_versions"] < self._bound.oldest_allowed)
            batch["loss_mask"] = batch["loss_mask"] & ~too_old
        self._measure(batch)
        self.metrics["time/trainer_idle"] = idle
        return self._return(rows)

    def _measure(self, batch: Batch) -> None:
        """Sets the metrics of a call: ages of the trained tokens, fill of the buffer, idle engines, dropped samples."""
        now = time.perf_counter()
        versions, mask = batch["policy_versions"], batch["loss_mask"]
        ages = torch.tensor([self._bound.age(version) for version in versions[mask].tolist()], dtype=torch.int64)
        counts = torch.bincount(ages, minlength=self._bound.max_staleness + 1).tolist()
        local = {f"age {age}": float(count) for age, count in enumerate(counts)}
        local |= {"too_old": float(((versions >= 0) & ~mask).sum()), "buffered": float(len(self._groups.completed))}
        local |= self._worker.take_counts()
        sums = sum_over_ranks([local])
        trained = max(sum(sums.get(f"age {age}", 0.0) for age in range(len(counts))), 1.0)
        outstanding = sum(len(group.ids) for group in self._groups.training)
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
