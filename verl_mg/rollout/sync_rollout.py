"""Rollouts whose calls end: synchronous, and one step off policy.

States between calls, and what leads from one to the other:

    IDLE       no samples in flight; `generate` generates its samples and waits for them
      |  generate, with rollout.mode=one_step_off and not in the last iteration: submits the prompts of the next call
      v
    IN_FLIGHT  engines generate for the next call, served by their workers (`EngineWorker`), while the main thread
      |        trains; `update_weights` only keeps the actor for later
      |  generate, of exactly the prefetched prompts:   waits for the samples, unblocked by the engines;
      |                                                 transfers the kept actor's weights                 -> IDLE
      |  generate_greedy, generate_for_eval:            wait for the samples, unblocked by the engines;
      v                                                 transfer the kept actor's weights; keep the batch
    READY      the batch of the next call is in memory; `update_weights` transfers immediately
         generate, of exactly the prefetched prompts:   returns the batch                                  -> IDLE

`generate` waits for samples, never for their scores (`RewardRole.wait`) nor for computation of other roles. A
checkpoint of IN_FLIGHT contains the prompts; its samples are generated again after a resume (`start_generating`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl_mg.batch import Batch
from verl_mg.data.prompts import Prompt
from verl_mg.engines.engine import count_metrics
from verl_mg.errors import UserError
from verl_mg.roles.models import Actor
from verl_mg.roles.reward import scoring_reward
from verl_mg.rollout.engine_group import EngineGroup
from verl_mg.rollout.groups import GroupState, RolloutState
from verl_mg.rollout.rollout import Call, LocalRolloutState, Rollout, RolloutSetup, put_origin
from verl_mg.rollout.work_queue import GroupFilter, ScoreFilter, filter_metrics
from verl_mg.rows.samples import GeneratedRows


class SyncRollout(Rollout):
    """Generates samples in calls that end.

    `extra_prompts`: as many prompts more than requested are submitted, pending ones included; the first complete ones
    are returned. `prefetch`: the samples of the next `generate` are generated while this iteration trains.
    `partial_rollout`: groups that were not complete are resumed in the next call, not dropped. `deterministic`: samples
    must not depend on the speed of engines.
    """

    def __init__(
        self,
        engines: EngineGroup,
        setup: RolloutSetup,
        *,
        extra_prompts: int = 0,
        prefetch: bool = False,
        partial_rollout: bool = False,
        deterministic: bool = False,
    ) -> None:
        super().__init__(engines, setup)
        self._extra_prompts, self._prefetch, self._partial_rollout = extra_prompts, prefetch, partial_rollout
        self._deterministic = deterministic
        self._in_flight: Call | None = None
        self._ready: GeneratedRows | None = None
        self._deferred_actor: Actor | None = None
        """Actor whose weights are transferred when the samples in flight are complete."""
        self._num_resumed_groups: int | None = None
        """Groups to return of the call that was in flight at the checkpoint."""

    def generate(self, prompts: Sequence[Prompt], num_samples: int = 1) -> Batch:
        """Implements `RolloutSource.generate`."""
        self._context.executor.require_outside_block("rollout.generate")
        if not self._ahead:
            rows = self._finish(self._submit(prompts, num_samples))
        else:
            self._check_ahead(prompts, num_samples)
            # A rank's batch may have no rows and is ready nevertheless.
            rows = self._wait_in_flight() if self._ready is None else self._ready
            self._ready, self._ahead = None, []
        batch = self._return(rows)
        if self._prefetch and not self._is_last and prompts:
            later = self._feed.peek(len(prompts))  # the recipe still draws them, with its next `next_batch`
            self._ahead, self._num_samples_ahead = [prompt.id for prompt in later], num_samples
            self._in_flight = self._submit(later, num_samples)
        return batch

    def generate_filtered(self, num_groups: int, num_samples: int, keep: GroupFilter, max_groups: int) -> Batch:
        """Returns groups that a filter keeps; each is filtered as soon as it is scored, while others are generated."""
        # Without extra prompts these are the first such groups in the order of the prompts, whatever the speed of
        # engines.
        self._context.executor.require_outside_block("rollout.generate_filtered")
        reward = scoring_reward(self._reward)
        if self._prefetch:
            raise UserError(
                "rollout.mode=one_step_off: which prompts a filtered call generates is not known before it. Write "
                "rollout.mode=sync or rollout.mode=async, or let the recipe sample in rounds."
            )
        if self._deterministic:
            raise UserError(
                "job.deterministic: which samples of a filtered call are computed together depends on the speed of "
                "engines and rewards. Write job.deterministic=false, or let the recipe sample in rounds."
            )
        num_pending = len(self._groups.training)
        # Peeked, not drawn: the prompts that were started are drawn in the end, so none is skipped in vain.
        self._groups.add(self._feed.peek(max(0, max_groups - num_pending)), num_samples)
        # Pending groups have been started already, so all of them are admitted, also beyond the extra prompts.
        num_extra = max(self._extra_prompts, num_pending - num_groups)
        score_ids = self._groups.score_ids
        score_filter = ScoreFilter(keep, lambda sample: reward.poll(score_ids[sample]), num_extra)
        call = self._start(self._groups.training, num_groups, self._sampling, score_filter)
        return self._return(self._finish(call, num_pending))

    def generate_for_eval(self, prompts: Sequence[Prompt], num_samples: int, **sampling: Any) -> Batch:
        """Waits for the samples in flight, then returns others; changes no ids and no seeds of training samples."""
        if self._in_flight:
            self._ready = self._wait_in_flight()
        batch = super().generate_for_eval(prompts, num_samples, **sampling)
        self._worker.take_counts()  # the evaluation must not be part of the next training call's metrics
        return batch

    def update_weights(self, actor: Actor) -> None:
        """Transfers the actor's weights to the engines; where samples are in flight, as soon as these are complete."""
        self._context.executor.require_outside_block("rollout.update_weights")
        # Weights do not change under the requests of a call: the transfer waits until its samples are complete.
        if self._in_flight:
            self._deferred_actor = actor
            return
        with self._context.timer("weight_sync"):
            self.metrics |= self._engines.update_weights(actor)

    # -- checkpoints

    def state(self) -> RolloutState:
        """Returns the sample ids, the pending groups and the prefetched prompts."""
        # Of the groups in flight the state before their call: a resumed job generates their missing samples again.
        return self._state(in_flight=self._in_flight.num_needed if self._in_flight else None)

    def local_state(self) -> LocalRolloutState:
        """Returns the samples of this rank's engine that wait for their group, and the rows that are ready."""
        done = {i for group in self._groups.training for i in group.done}
        with self._worker.stopped():
            completed = {i: sample for i, sample in self._groups.completed.items() if i in done}
            return LocalRolloutState(completed, dict(self._groups.partial), self._ready)

    def _load(self, state: RolloutState, local: LocalRolloutState, prompt_of: Callable[[int], Prompt]) -> None:
        """Resumes from a checkpoint; samples that were in flight are generated again, complete ones scored again."""
        super()._load(state, local, prompt_of)
        self._num_resumed_groups = state.in_flight
        if local.ready is not None:
            # A copy: the rows get new columns.
            batch = local.ready.batch.select_columns(local.ready.batch.names())
            self._ready = replace(local.ready, batch=batch)
            if self._reward:
                put_origin(batch, self._reward.submit_rows(self._ready))

    def start_generating(self) -> None:
        """Submits the groups that were in flight at the checkpoint, after the first `update_weights`."""
        if self._num_resumed_groups is not None:
            self._in_flight = self._start(self._groups.training, self._num_resumed_groups, self._sampling)
            self._num_resumed_groups = None

    # -- one call

    @property
    def _first_evaluation_number(self) -> int:
        return self._groups.next_id

    def _submit(self, prompts: Sequence[Prompt], num_samples: int) -> Call:
        """Starts a call of all pending groups, which come first, and of new ones."""
        # Groups that wait from earlier calls count as extra ones, so that they do not become more with each call.
        num_pending = len(self._groups.training)
        num_extra = max(0, self._extra_prompts - num_pending) if prompts else 0
        self._groups.add([*prompts, *self._feed.draw_extra(num_extra)], num_samples)
        return self._start(self._groups.training, len(prompts) or num_pending, self._sampling)

    def _finish(self, call: Call, num_pending: int | None = None) -> GeneratedRows:
        """Waits for a call and returns this rank's rows of the groups that were complete first.

        `num_pending` is given for a call with a filter: the number of groups that were there before its candidates.
        """
        self._wait_for(call)
        with self._context.timer("row_dispatch"):
            reports = self._exchange(call, counts=self._worker.take_counts())
            self._measure([report["counts"] for report in reports])
            selected = self._select(call, reports)
            rejected = [call.groups[number] for report in reports for number in report["rejected"]]
            if num_pending is not None:
                num_started = max(report["started"] for report in reports)
                self._feed.next_batch(num_started - num_pending)
                self._groups.withdraw(call.groups[num_started:])
                for group in (*selected, *rejected):
                    group.state = GroupState.SCORED
                scores = [score for report in reports for score in report["scores"]]
                self.metrics |= filter_metrics(len(rejected), scores)
            rows = self._assemble(selected, self._sampling, call.is_fresh and len(selected) == len(call.groups))
        self._drop(rejected)
        if not self._partial_rollout:
            self._drop(self._groups.training)
        for group in self._groups.training:
            group.state = GroupState.WAITING
        return rows

    def _check_ahead(self, prompts: Sequence[Prompt], num_samples: int) -> None:
        if [prompt.id for prompt in prompts] != self._ahead or num_samples != self._num_samples_ahead:
            raise UserError(
                f"rollout.mode=one_step_off: {self._num_samples_ahead} samples of each of {len(self._ahead)} prompts "
                f"were generated in advance, but the recipe requests {num_samples} of {len(prompts)} prompts, or other "
                "prompts. Request the prompts of job.prompts.next_batch(n) with the same n and number of samples each "
                "time, or write rollout.mode=sync."
            )

    def _wait_in_flight(self) -> GeneratedRows:
        """Returns the rows of the call in flight, and transfers the weights that waited for it."""
        assert self._in_flight is not None
        in_flight, self._in_flight = self._in_flight, None
        rows = self._finish(in_flight)
        if self._deferred_actor is not None:
            actor, self._deferred_actor = self._deferred_actor, None
            self.update_weights(actor)
        return rows

    def _measure(self, counts: Sequence[Mapping[str, float]]) -> None:
        """Sets the metrics of a call: how evenly engines were loaded (the largest load over the mean), and counters."""
        engines = [count for count, is_leader in zip(counts, self._engines.is_leader, strict=True) if is_leader]
        self.metrics |= {
            "time/busiest_engine": _max_over_mean([count["busy"] for count in engines]),
            "rollout/load_imbalance": _max_over_mean([count["tokens"] for count in engines]),
            "rollout/engine_deaths": sum(count["deaths"] for count in counts),
            "time/rollout_busy": max(count["busy"] for count in counts),
        } | count_metrics(counts)


def _max_over_mean(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values) if any(values) else 1.0
