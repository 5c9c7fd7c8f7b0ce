"""The rollout as a recipe uses it: prompts in, a `Batch` distributed over the ranks out.

States between calls, and what leads from one to the other:

    IDLE       no samples in flight; `generate` generates its samples and waits for them
      |  generate, with rollout.mode=one_step_off and not in the last iteration: submits the prompts of the next call
      v
    IN_FLIGHT  engines generate for the next call, served by a thread of each rank that leads one (`EngineLoop`), while
      |        the main thread trains; `update_weights` only keeps the actor for later
      |  generate, of exactly the prefetched prompts:   waits for the samples, unblocked by the engines;
      |                                                 transfers the kept actor's weights                 -> IDLE
      |  generate_greedy, generate_for_eval:            wait for the samples, unblocked by the engines;
      v                                                 transfer the kept actor's weights; keep the batch
    READY      the batch of the next call is in memory; `update_weights` transfers immediately
         generate, of exactly the prefetched prompts:   returns the batch                                  -> IDLE

`generate` waits for samples, never for their scores (`RewardRole.wait`) nor for computation of other roles. A
checkpoint of IN_FLIGHT contains the prompts; its samples are generated again after a resume (`resume_in_flight`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed import PrefixStore, Store

from verl_mg.batch import Batch
from verl_mg.data.prompt_feed import PromptFeed
from verl_mg.data.prompts import Prompt
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.engines.engine import Request, Sample, Sampling, count_metrics
from verl_mg.errors import UserError
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor
from verl_mg.roles.reward import RewardRole, scoring_reward
from verl_mg.rollout.engine_group import EngineGroup
from verl_mg.rollout.engine_loop import EngineLoop
from verl_mg.rollout.filtered_queue import FilteredWorkQueue, GroupFilter
from verl_mg.rollout.group_rows import distribute_rows, group_rows, put_origin, sample_seed
from verl_mg.rollout.pending_groups import GenerationCall, PendingGroup, PendingGroups, RolloutState
from verl_mg.rollout.rollout_source import LocalRolloutState, RolloutSource, filter_metrics
from verl_mg.rollout.work_queue import Group, WorkQueue
from verl_mg.rows.records import GeneratedRows, RolloutRecords

MakeQueue = Callable[[Store, str, Sequence[Group], int], WorkQueue]
"""Makes the work queue of a call, from the arguments of `EngineGroup.make_queue`."""


@dataclass(frozen=True)
class _InFlight:
    call: GenerationCall
    queue: WorkQueue
    loop: EngineLoop


@dataclass(frozen=True)
class _Prefetched:
    """Arguments that the next `generate` must be called with."""

    prompt_ids: list[int]
    num_samples: int


class Rollout(RolloutSource):
    """Generates samples on the engines of all ranks; all ranks call every method together."""

    def __init__(
        self,
        engines: EngineGroup,
        sampling: Sampling,
        seed: int,
        context: JobContext,
        prompts: PromptFeed,
        records: RolloutRecords,
        reward: RewardRole | None = None,
        *,
        extra_prompts: int = 0,
        prefetch: bool = False,
        partial_rollout: bool = False,
        deterministic: bool = False,
        routed_shape: tuple[int, int] | None = None,
    ) -> None:
        """Creates the rollout of a job.

        Args:
            engines: the engines of all ranks.
            sampling: how tokens are drawn in training.
            seed: of the job; with the sample id it is the seed of a sample.
            context: the shared services of the job.
            prompts: the prompts of the job, from which extra and prefetched ones are drawn.
            records: receives the batches for the recording of samples.
            reward: scores samples while others are generated; None: nothing is scored.
            extra_prompts: this many prompts more than requested are submitted, pending ones included; the first
                complete ones are returned.
            prefetch: whether the samples of the next `generate` are generated while this iteration trains.
            partial_rollout: whether groups that were not complete are resumed in the next call, not dropped.
            deterministic: whether samples must not depend on the speed of engines.
            routed_shape: (layers, experts per token) of the experts that engines report; None: they report none.
        """
        super().__init__(records)
        self._engines, self._sampling, self._seed, self._feed, self._reward = engines, sampling, seed, prompts, reward
        self._extra_prompts, self._prefetch, self._partial_rollout = extra_prompts, prefetch, partial_rollout
        self._deterministic = deterministic
        self._context, self._store = context, PrefixStore("rollout", context.store)
        self._routed_shape = routed_shape
        self._num_calls = 0
        self._pending = PendingGroups()
        self._score_ids: dict[int, int] = {}
        """Score of each complete sample of this rank's engine that has not been returned."""
        self._in_flight: _InFlight | None = None
        self._ready: GeneratedRows | None = None
        self._prefetched: _Prefetched | None = None
        self._deferred_actor: Actor | None = None
        """Actor whose weights are transferred when the samples in flight are complete."""
        self._num_resumed_groups: int | None = None
        """Groups to return of the call that was in flight at the checkpoint."""

    def generate(self, prompts: Sequence[Prompt], num_samples: int = 1) -> Batch:
        """Returns samples of as many prompts as requested, different rows on each rank.

        With extra prompts or pending ones the groups that are complete first are returned, which may be others than
        those requested. Columns: tokens, loss_mask, rollout_logprobs, policy_versions, prompt_id, prompt_length, group,
        trajectory, sample_id, policy_version, truncated, generated_by; prefix_of and prefix_length of agents;
        routed_experts where the engines report them; score_id with a reward. Where the engine can, a sample depends
        only on the job's seed and its id, not on the ranks.

        Args:
            prompts: the prompts, the same on every rank; with none all pending groups are completed.
            num_samples: samples of each prompt.

        Raises:
            UserError: prefetched samples are ready, and `prompts` are not those prefetched.
        """
        self._context.executor.require_outside_block("rollout.generate")
        if self._prefetched is None:
            rows = self._finish(self._start(self._new_call(prompts, num_samples), self._sampling))
        else:
            self._check_prefetched(prompts, num_samples)
            # A rank's batch may have no rows and is ready nevertheless.
            rows = self._wait_in_flight() if self._ready is None else self._ready
            self._ready = self._prefetched = None
        self._train_batches.append(rows.batch)
        self._records.add(rows)
        if self._prefetch and not self._is_last and prompts:
            self._start_prefetch(len(prompts), num_samples)
        return rows.batch

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
        num_pending = len(self._pending)
        # Peeked, not drawn: `_admitted` draws the prompts that were started, so none is skipped in vain.
        candidates = self._feed.peek(max(0, max_groups - num_pending))
        call = self._pending.new_call(candidates, num_samples, num_groups, is_filtered=True)
        # Pending groups have been started already, so all of them are admitted, also beyond the extra prompts.
        num_extra = max(self._extra_prompts, num_pending - num_groups)

        def make_queue(store: Store, key: str, groups: Sequence[Group], num_groups_needed: int) -> WorkQueue:
            samples = [group.ids for group in call.groups]
            queue = FilteredWorkQueue(
                store, key, groups, samples, num_groups_needed, num_extra,
                lambda sample: reward.poll(self._score_ids[sample]), keep,
            )  # fmt: skip
            # A group of an earlier call is filtered by all its scores, also of samples that were completed then.
            for sample in sorted(self._pending.completed.keys() & call.prompt_of.keys()):
                queue.mark_done(sample)
            return queue

        rows = self._finish(self._start(call, self._sampling, make_queue))
        self._train_batches.append(rows.batch)
        self._records.add(rows)
        return rows.batch

    def generate_greedy(self, prompts: Sequence[Prompt]) -> Batch:
        """Returns the greedy response to each prompt; see `generate_for_eval`."""
        return self.generate_for_eval(prompts, 1, temperature=0.0)

    def generate_for_eval(self, prompts: Sequence[Prompt], num_samples: int, **sampling: Any) -> Batch:
        """Waits for the samples in flight, then returns others; changes no ids and no seeds of training samples."""
        self._context.executor.require_outside_block("rollout.generate_for_eval")
        if self._in_flight:
            self._ready = self._wait_in_flight()
        metrics = dict(self.metrics)  # the evaluation must not replace the metrics of the last training call
        call = self._pending.new_evaluation_call(prompts, num_samples)
        rows = self._finish(self._start(call, replace(self._sampling, **sampling)))
        self.metrics = metrics
        self._records.add(rows)
        return rows.batch

    def update_weights(self, actor: Actor) -> None:
        """Transfers the actor's weights to the engines; where samples are in flight, as soon as these are complete."""
        self._context.executor.require_outside_block("rollout.update_weights")
        # Weights do not change under the requests of a call: the transfer waits until its samples are complete.
        if self._in_flight:
            self._deferred_actor = actor
            return
        with self._context.timer("weight_sync"):
            self.metrics |= self._engines.update_weights(actor)

    def close(self) -> None:
        """Ends the engines that this job has started."""
        self._engines.close()

    # -- checkpoints

    def state(self) -> RolloutState:
        """Returns the sample ids, the pending groups and the prefetched prompts."""
        # The groups in flight have left `_pending`; a resumed job generates their missing samples again.
        call = self._in_flight.call if self._in_flight else None
        groups = call.groups if call else self._pending.groups
        return RolloutState(
            next_id=self._pending.next_id,
            groups=[group.state() for group in groups],
            in_flight=call.num_groups_needed if call else None,
            prefetched=self._prefetched.prompt_ids if self._prefetched else [],
            prefetched_samples=self._prefetched.num_samples if self._prefetched else 0,
        )

    def local_state(self) -> LocalRolloutState:
        """Returns the samples of this rank's engine that wait for their group, and the rows that are ready."""
        return LocalRolloutState(self._pending.completed, self._pending.partial, self._ready)

    def load(self, state: RolloutState, local: LocalRolloutState, prompt_of: Callable[[int], Prompt]) -> None:
        """Resumes from a checkpoint; samples that were in flight are generated again, complete ones scored again."""
        # A checkpoint may be resumed by fewer ranks: what no rank has loaded is missing, and generated again.
        reports = all_gather_json([list(local.completed), list(local.partial)])
        completed, partial = ({i for report in reports for i in report[which]} for which in (0, 1))
        groups = [PendingGroup.from_state(group, prompt_of, completed, partial) for group in state.groups]
        self._pending.load(state.next_id, groups, local.completed, local.partial)
        self._num_resumed_groups = state.in_flight
        if local.ready is not None:
            # A copy: the rows get new columns.
            batch = local.ready.batch.select_columns(local.ready.batch.names())
            self._ready = replace(local.ready, batch=batch)
        if state.prefetched:
            self._prefetched = _Prefetched(list(state.prefetched), state.prefetched_samples)
        if self._reward is None:
            return
        prompt_of_sample = {i: group.prompt for group in groups for i in group.ids}
        for i, sample in self._pending.completed.items():
            self._score_ids[i] = self._reward.submit(prompt_of_sample[i], sample)
        if self._ready is not None:
            put_origin(self._ready.batch, self._reward.submit_rows(self._ready))

    def resume_in_flight(self) -> None:
        """Submits the groups that were in flight at the checkpoint, after the first `update_weights`."""
        if self._num_resumed_groups is None:
            return
        call = self._pending.new_call([], 0, self._num_resumed_groups)
        self._num_resumed_groups = None
        self._in_flight = self._start(call, self._sampling)
        self._in_flight.loop.start_background()

    # -- prefetch

    def _start_prefetch(self, num_prompts: int, num_samples: int) -> None:
        """Submits the prompts that the next `job.prompts.next_batch(num_prompts)` returns."""
        prompts = self._feed.peek(num_prompts)  # the recipe still draws them, with its next `next_batch`
        self._prefetched = _Prefetched([prompt.id for prompt in prompts], num_samples)
        self._in_flight = self._start(self._new_call(prompts, num_samples), self._sampling)
        self._in_flight.loop.start_background()

    def _check_prefetched(self, prompts: Sequence[Prompt], num_samples: int) -> None:
        requested = _Prefetched([prompt.id for prompt in prompts], num_samples)
        if requested != self._prefetched and self._prefetched:
            raise UserError(
                f"rollout.mode=one_step_off: {self._prefetched.num_samples} samples of each of "
                f"{len(self._prefetched.prompt_ids)} prompts were generated in advance, but the recipe requests "
                f"{num_samples} of {len(prompts)} prompts, or other prompts. Request the prompts of "
                "job.prompts.next_batch(n) with the same n and number of samples each time, or write "
                "rollout.mode=sync."
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

    # -- one call

    def _new_call(self, prompts: Sequence[Prompt], num_samples: int) -> GenerationCall:
        # Groups that wait from earlier calls count as extra ones, so that they do not become more with each call.
        num_extra = max(0, self._extra_prompts - len(self._pending)) if prompts else 0
        extra = self._feed.draw_extra(num_extra)
        num_groups_needed = len(prompts) or len(self._pending)
        return self._pending.new_call([*prompts, *extra], num_samples, num_groups_needed)

    def _start(self, call: GenerationCall, sampling: Sampling, make_queue: MakeQueue | None = None) -> _InFlight:
        """Submits the first requests to the engines; `make_queue` replaces the queue of the engines."""
        self._num_calls += 1
        key = f"rollout/{self._num_calls}"
        groups = [call.groups[i].missing for i in call.incomplete]
        queue = (make_queue or self._engines.make_queue)(self._store, key, groups, call.num_missing_groups)
        prompt_of, partial, reward = call.prompt_of, self._pending.partial, self._reward

        def request_of(sample: int) -> Request:
            prompt, seed = prompt_of[sample], sample_seed(self._seed, sample)
            # Popped: what becomes of the sample, complete or aborted again, replaces it.
            return Request(sample, prompt.tokens, seed, partial.pop(sample, None), prompt, prompt.load_images())

        def on_sample(sample: Sample) -> None:
            self._context.timer.progress += 1  # the watchdog sees that a long call progresses
            if reward:
                self._score_ids[sample.id] = reward.submit(prompt_of[sample.id], sample)

        # Only this rank has the tokens of its partial samples; the queue gives fresh ones to any engine.
        partial_requests = [request_of(i) for i in sorted(partial.keys() & prompt_of.keys())]
        self._engines.acquire_memory()
        loop = EngineLoop(
            self._engines.engine, self._engines.num_engines, queue, self._store, key, self._engines, on_sample
        )
        loop.start(partial_requests, request_of, sampling)
        return _InFlight(call, queue, loop)

    def _finish(self, in_flight: _InFlight) -> GeneratedRows:
        """Waits for a call and returns this rank's rows of the groups that were complete first."""
        call, timer = in_flight.call, self._context.timer
        with timer("generate"):
            result = in_flight.loop.run()
        timer.barrier("generate")
        self._pending.add_results(result.completed, result.aborted)
        with timer("row_dispatch"):
            # One exchange of everything that all ranks must agree on: the selection below is the same on each.
            reports = all_gather_json(
                {
                    "completed": list(result.completed),
                    "partial": list(self._pending.partial),
                    "order": list(in_flight.queue.completion_order.items()),
                    "rejected": list(in_flight.queue.rejected),
                    "admitted": in_flight.queue.num_admitted,
                    "scores": in_flight.queue.filtered_scores,
                    "tokens": result.num_tokens,
                    "busy": result.busy_seconds,
                    "deaths": result.num_deaths,
                    "counts": dict(self._engines.engine.take_counts()) if self._engines.engine else {},
                }
            )
            in_flight.queue.delete_keys()  # after the exchange no rank reads the counters of the call
            self._measure(reports)
            rejected = {group for report in reports for group in report["rejected"]}
            if call.is_filtered:
                call = self._admitted(call, max(report["admitted"] for report in reports))
                scores = [score for report in reports for score in report["scores"]]
                self.metrics |= filter_metrics(len(rejected), scores)
            selected = call.select([dict(report["order"]) for report in reports])
            rows = self._assemble([call.groups[i] for i in selected], call.returns_fresh_groups_only(selected))
        completed, partial = ({i for report in reports for i in report[name]} for name in ("completed", "partial"))
        gone = self._pending.finish(
            call, selected, completed, partial, keep_rest=self._partial_rollout, rejected=rejected
        )
        self._forget_scores(gone, {i for g in selected for i in call.groups[g].ids})
        return rows

    def _admitted(self, call: GenerationCall, num_admitted: int) -> GenerationCall:
        """Returns the groups of the newest call that could be started; prompts of the others are drawn again."""
        self._feed.next_batch(num_admitted - call.num_pending)
        return self._pending.admitted(call, num_admitted)

    def _forget_scores(self, gone: set[int], returned: set[int]) -> None:
        """Drops the scores of samples that are neither returned nor pending."""
        score_ids = {i: self._score_ids.pop(i) for i in gone if i in self._score_ids}
        if self._reward:  # scores of returned samples stay until `RewardRole.wait`
            self._reward.discard(score_id for i, score_id in score_ids.items() if i not in returned)

    def _measure(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Sets the metrics of a call: how evenly engines were loaded (the largest load over the mean), and counters."""
        engines = [report for report, is_leader in zip(reports, self._engines.is_leader, strict=True) if is_leader]
        self.metrics |= {
            "time/busiest_engine": _max_over_mean([report["busy"] for report in engines]),
            "rollout/load_imbalance": _max_over_mean([report["tokens"] for report in engines]),
            "rollout/engine_deaths": sum(report["deaths"] for report in reports),
            "time/rollout_busy": max(report["busy"] for report in reports),
        } | count_metrics(report["counts"] for report in reports)

    def _assemble(self, groups: Sequence[PendingGroup], fresh_only: bool) -> GeneratedRows:
        """Returns this rank's rows of groups, each sent by the rank that generated it."""
        # `fresh_only`: all groups of the call are returned, and none was started in an earlier call.
        score_ids = self._score_ids if self._reward else None
        rows = group_rows(groups, self._pending.completed, score_ids, self._engines.version, self._routed_shape)
        # Fixed shares give each rank whole groups. Pending or unselected groups would leave them uneven.
        if fresh_only and self._engines.rows_are_local:
            return rows
        return distribute_rows(rows, groups, self._context.rows)


def _max_over_mean(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values) if any(values) else 1.0
