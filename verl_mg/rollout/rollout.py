"""The rollout: the interface of whatever gives a recipe its samples, and the core of all modes on engines.

One core generates in every mode; `SyncRollout` and `AsyncRollout` decide what is submitted, when `generate` returns,
and when weights arrive:

    mode            groups submitted                        `generate` returns                weights arrive
    sync            the groups of this call                 when they are complete            between calls
    one_step_off    the groups of the next call, while      the same                          when they are complete
                    this iteration trains
    async           as many as the bound of staleness       the oldest complete groups        between two tokens of
                    allows                                                                    running requests

An evaluation is a call that ends, in every mode. In async its requests run together with training's: free slots go to
it first, and nothing is stopped or aborted. It returns when its groups are complete, before the next update, so that
its samples are of one policy version.

    Rollout          _start: groups ──▶ WorkQueue ──▶ EngineWorker ──▶ engine
      main thread    _wait for the event of the end                     │ samples
                     _finish: rows of groups  ◀──  GroupBuffer  ◀── _on_sample, which submits them to the reward

While a rank waits, it transfers weights to engines that were restarted: all ranks have a part of them.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

from verl_mg.batch import Batch, ColumnKind
from verl_mg.data.prompt_feed import PromptFeed
from verl_mg.data.prompts import Prompt
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.engines.engine import Request, Sample, Sampling
from verl_mg.engines.trajectory import without_agent
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor
from verl_mg.roles.reward import NOT_SCORED, RewardRole
from verl_mg.rollout.engine_group import EngineGroup, InFlightEngineGroup
from verl_mg.rollout.engine_worker import EngineWorker
from verl_mg.rollout.groups import (
    Group,
    GroupBuffer,
    GroupState,
    RolloutState,
    first_complete,
    how_drawn,
    sample_number,
    sample_seed,
)
from verl_mg.rollout.work_queue import GroupFilter, ScoreFilter, WorkQueue
from verl_mg.rows.dispatch import gather_rows
from verl_mg.rows.plan import RowIndexer
from verl_mg.rows.samples import (
    PLAIN,
    GeneratedRows,
    OptionalColumns,
    RolloutRecord,
    conversation_of,
    exchange_conversations,
    samples_to_batch,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalRolloutState:
    """The part of a rollout's state that only this rank has."""

    completed: Mapping[int, Sample] = field(default_factory=dict)
    """Complete samples by id, whose groups have not been returned."""
    partial: Mapping[int, Sample] = field(default_factory=dict)
    ready: GeneratedRows | None = None
    """Rows that were generated in advance, and that the next `generate` returns."""


class RolloutSource(ABC):
    """Source of samples, as a recipe and the training loop use it; all ranks call every method together."""

    is_replay = False
    """Whether the samples were recorded in an earlier run: then there are no engines and no evaluation."""
    drawn: Mapping[str, Any] = {}  # how samples are drawn, see `how_drawn`

    def __init__(self, records: list[RolloutRecord]) -> None:
        self.records = records
        """Records of all batches of this iteration, in the order in which they were returned."""
        self.train_batches: list[Batch] = []
        """Batches of this iteration that `generate` returned."""
        self._is_last = True
        self.metrics: dict[str, float] = {}
        """Metrics of the last `generate` and the last transfer of weights."""

    def start_iteration(self, iteration: int, is_last: bool) -> None:
        """Starts the records of an iteration.

        Args:
            iteration: number of the iteration, from 1.
            is_last: whether no iteration follows, so that no samples are generated in advance.
        """
        self._is_last, self.train_batches = is_last, []
        self.records.clear()

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], num_samples: int = 1) -> Batch:
        """Returns samples of prompts; each rank has other rows.

        With extra prompts or pending ones the groups that are complete first are returned, which may be others than
        those requested. Columns: tokens, loss_mask, rollout_logprobs, policy_versions, prompt_id, prompt_length, group,
        trajectory, sample_id, policy_version, truncated, generated_by; prefix_of and prefix_length of agents; agent of
        agents with names; routed_experts where the engines report them; score_id with a reward. Where the engine can,
        a sample depends only on the job's seed and its id, not on the ranks.

        Args:
            prompts: the prompts, the same on every rank; with none all pending groups are completed.
            num_samples: samples of each prompt.

        Raises:
            UserError: samples are generated in advance, and `prompts` differ from `job.prompts.next_batch`; or the
                first samples after a start differ from the trainer by more than `rollout.max_mismatch`.
        """

    @abstractmethod
    def generate_filtered(self, num_groups: int, num_samples: int, keep: GroupFilter, max_groups: int) -> Batch:
        """Draws prompts until enough groups pass a filter; each rejected group is replaced by a further prompt.

        Args:
            num_groups: number of groups that are returned; fewer if `max_groups` are not enough.
            num_samples: samples of each prompt.
            keep: whether a group is kept, from the rewards of its samples.
            max_groups: largest number of groups that are generated.

        Returns:
            samples of the groups that are kept; each rank has other rows.
        """

    @abstractmethod
    def generate_for_eval(self, prompts: Sequence[Prompt], num_samples: int, **sampling: Any) -> Batch:
        """Returns samples that are not trained on, of one policy version; they change no training sample.

        Args:
            prompts: the prompts, the same on every rank.
            num_samples: samples of each prompt.
            sampling: fields of `Sampling` that replace the values of training, such as temperature=0.0.
        """

    def generate_greedy(self, prompts: Sequence[Prompt]) -> Batch:
        """Returns the greedy response to each prompt.

        Args:
            prompts: the prompts, the same on every rank.
        """
        return self.generate_for_eval(prompts, 1, temperature=0.0)

    @abstractmethod
    def update_weights(self, actor: Actor) -> None:
        """Transfers the actor's weights to the engines."""

    # -- checkpoints, of sources that have unfinished samples

    def state(self) -> RolloutState | None:
        """Returns what all ranks know of unfinished samples, for a checkpoint; None where there is nothing to save."""
        return None

    def local_state(self) -> LocalRolloutState:
        """Returns what only this rank has of unfinished samples, for a checkpoint; called before `state`."""
        return LocalRolloutState()

    def load(self, state: RolloutState, local: LocalRolloutState, prompt_of: Callable[[int], Prompt]) -> None:  # noqa: B027
        """Resumes from a checkpoint, before the first `update_weights`; `local` is this rank's share of local states.

        `state` is the same on every rank, and `prompt_of` returns the prompt of an id.
        """

    def start_generating(self) -> None:  # noqa: B027
        """Starts, once after the first `update_weights`, what waits for no `generate`: samples that a checkpoint had in
        flight, and the workers of asynchronous engines."""

    def close(self) -> None:  # noqa: B027
        """Ends the engines that this job has started."""


@dataclass(frozen=True)
class Call:
    """Groups of training or of an evaluation that engines generate until enough of them are complete."""

    groups: Sequence[Group]
    num_needed: int
    queued: Sequence[Group]
    """Groups in the queue: those with missing samples, and with a filter all."""
    queue: WorkQueue
    is_fresh: bool
    """Whether no group was started in an earlier call, and engines have whole groups where their shares are fixed."""


@dataclass(frozen=True, kw_only=True)
class RolloutSetup:
    """Everything that a rollout needs besides engines."""

    sampling: Sampling
    """Sampling parameters of training."""
    seed: int
    """Seed of the job; with the sample id it is the seed of a sample."""
    context: JobContext
    prompts: PromptFeed
    """Prompts of the job, from which those beyond the requested ones are drawn."""
    records: list[RolloutRecord]
    """Receives the batches for the recording of samples."""
    reward: RewardRole | None = None
    """Scores samples while others are generated; None: nothing is scored."""
    columns: OptionalColumns = PLAIN
    """Columns of the rows, as far as calls do not differ in them."""
    longest: int | None = None
    """Most tokens of a sample with its prompt, where the number of samples in flight follows the engines' load."""
    check: Callable[[Batch], None] | None = None
    """Is called with the rows that `generate` is about to return, on all ranks, and may refuse them."""


class Rollout(RolloutSource):
    """Core of the modes; generates samples on the engines of all ranks."""

    def __init__(self, engines: EngineGroup, setup: RolloutSetup) -> None:
        super().__init__(setup.records)
        self._engines, self._setup, self._reward = engines, setup, setup.reward
        self._sampling, self._context, self._feed = setup.sampling, setup.context, setup.prompts
        # Counters that no other engine uses stay in its rank.
        self._store = PrefixStore("rollout", setup.context.store) if engines.num_engines > 1 else HashStore()
        self.drawn = how_drawn(setup.sampling, setup.columns.agent_names)
        self._groups, self._num_calls = GroupBuffer(), 0
        self._ahead: list[int] = []
        """Prompts that were submitted for later calls, in order; the recipe must request them next."""
        self._num_samples_ahead = 0
        """Samples of each of these prompts."""
        # An engine in the rank's own process has no thread: only the main thread uses it.
        self._separate = engines if isinstance(engines, InFlightEngineGroup) else None
        restart = self._separate.restart if self._separate else None
        self._worker = EngineWorker(
            engines.engine,
            engines.num_engines,
            engines.events,
            self._request_of,
            self._on_sample,
            self._on_abort,
            restart,
            setup.longest,
        )

    def generate_for_eval(self, prompts: Sequence[Prompt], num_samples: int, **sampling: Any) -> Batch:
        """Implements `RolloutSource.generate_for_eval`, while samples of training may be in flight."""
        self._context.executor.require_outside_block("rollout.generate_for_eval")
        groups = self._groups.add_evaluation(prompts, num_samples, self._first_evaluation_number)
        # Nothing trains on these samples.
        drawn = replace(self._sampling, returns_support=False, top_logprobs=0, **sampling)
        call = self._start(groups, len(groups), drawn)
        self._wait_for(call)
        with self._context.timer("row_dispatch"):
            self._exchange(call)
            rows = self._assemble(groups, drawn, is_whole_call=True)
        self.records.append(RolloutRecord.of(rows))
        return rows.batch

    def close(self) -> None:
        """Ends the worker's thread, and the engines that this job has started."""
        self._worker.close()
        self._engines.close()

    @property
    @abstractmethod
    def _first_evaluation_number(self) -> int:
        """Number of the first sample of an evaluation, from which its seed is computed."""

    # -- called by the worker, in its thread if it has one

    def _request_of(self, sample: int) -> Request:
        prompt, seed = self._groups.prompt_of(sample), sample_seed(self._setup.seed, sample_number(sample))
        # Popped: what becomes of the sample, complete or aborted again, replaces it.
        partial = self._groups.partial.pop(sample, None)
        return Request(sample, prompt.tokens, seed, partial, prompt, prompt.load_images())

    def _on_sample(self, sample: Sample) -> None:
        self._context.timer.progress += 1  # the watchdog sees that a long call progresses
        self._groups.completed[sample.id] = sample
        self._score(sample)

    def _on_abort(self, sample: Sample) -> None:
        # A sample without tokens has nothing to continue.
        if sample.tokens:
            self._groups.partial[sample.id] = sample

    def _score(self, sample: Sample) -> None:
        if self._reward:
            prompt = self._groups.prompt_of(sample.id)
            self._groups.score_ids[sample.id] = self._reward.submit(prompt, sample)

    # -- a call

    def _start(
        self, groups: Sequence[Group], num_needed: int, sampling: Sampling, score_filter: ScoreFilter | None = None
    ) -> Call:
        """Submits groups to the engines, which generate until `num_needed` are complete."""
        self._num_calls += 1
        queued = [group for group in groups if group.num_missing or score_filter]
        is_fresh = not (score_filter or any(group.done or group.partial for group in groups))
        queue = WorkQueue(
            self._store,
            f"call/{self._num_calls}",
            sampling,
            queued,
            max(0, num_needed - (len(groups) - len(queued))),
            share=None if score_filter else self._engines.share,
            score_filter=score_filter,
        )
        for group in queued:
            group.state = GroupState.RUNNING
            # A group of an earlier call is filtered by all its scores, also of samples that were completed then.
            if score_filter:
                queue.mark_done(sorted(group.done & self._groups.completed.keys()))
        self._engines.acquire_memory()
        self._worker.add(queue, self._resumed(queued))
        if self._separate:
            self._worker.start()
        return Call(list(groups), num_needed, queued, queue, is_fresh)

    def _resumed(self, groups: Iterable[Group]) -> list[int]:
        """Returns the aborted samples of groups of which this rank has the tokens, as no other has."""
        return [i for group in groups for i in sorted(group.partial & self._groups.partial.keys())]

    def _wait_for(self, call: Call) -> None:
        """Waits until enough groups of a call are complete and all engines have stopped to generate others."""
        with self._context.timer("generate"):
            if self._separate is None:
                self._worker.work_off(call.queue)
            self._wait(call.queue.key)
        self._context.timer.barrier("generate")

    def _wait(self, event: str) -> None:
        """Waits for the announcement of an end; weights are transferred to engines that were restarted meanwhile."""
        events = self._engines.events
        # Consumes the events of the job's store; woken by any of them, also by an error of this rank's worker; ends by
        # the announcement.
        while not events.has_ended(event):
            for engine in events.wait():
                assert self._separate is not None  # others do not restart
                self._separate.recover(engine)
                self._worker.weights_arrived(engine)
            self._worker.check()

    def _exchange(self, call: Call, **further: Any) -> list[dict[str, Any]]:
        """Returns the reports of all ranks on a call that has ended, and updates its groups."""
        # One exchange of everything that all ranks must agree on.
        known = {i for group in call.groups for i in group.ids}
        with self._worker.stopped():
            completed, partial = (list(known & part.keys()) for part in (self._groups.completed, self._groups.partial))
        reports = all_gather_json({"completed": completed, "partial": partial} | call.queue.report() | further)
        call.queue.delete_keys()  # after the exchange no rank reads the counters of the call
        everywhere = ({i for report in reports for i in report[name]} for name in ("completed", "partial"))
        self._groups.update(call.groups, *everywhere)
        return reports

    def _select(self, call: Call, reports: Sequence[Mapping[str, Any]]) -> list[Group]:
        """Returns the groups of a call that were complete first, in the order of their ids."""
        orders = [dict(report["order"]) for report in reports]
        return first_complete(call.groups, call.queued, orders, call.num_needed)

    def _assemble(self, groups: Sequence[Group], sampling: Sampling, is_whole_call: bool = False) -> GeneratedRows:
        """Returns this rank's rows of groups, each sent by the rank that generated it, and removes the groups."""
        buffer = self._groups
        score_ids = buffer.score_ids if self._reward else None
        columns = self._setup.columns
        columns = replace(columns, has_support=sampling.reports_support, num_top=sampling.top_logprobs)
        with self._worker.stopped():
            rows = group_rows(groups, buffer.completed, score_ids, self._engines.version, columns)
            buffer.remove(groups, GroupState.RETURNED)  # their scores stay until `RewardRole.wait`
        # Fixed shares give each rank whole groups. Groups of earlier calls, or not all of a call, would be uneven.
        if is_whole_call and self._engines.rows_are_local:
            return rows
        return distribute_rows(rows, groups, self._context.rows)

    def _drop(self, groups: Sequence[Group]) -> None:
        """Drops groups with their samples and scores."""
        with self._worker.stopped():
            scores = self._groups.remove(groups, GroupState.DROPPED)
        if self._reward:
            self._reward.discard(scores)

    def _return(self, rows: GeneratedRows) -> Batch:
        """Checks and records rows that `generate` returns."""
        if self._setup.check:
            self._setup.check(rows.batch)
        self.train_batches.append(rows.batch)
        self.records.append(RolloutRecord.of(rows))
        return rows.batch

    # -- checkpoints

    def _state(self, in_flight: int | None = None, versions: Sequence[int] = ()) -> RolloutState:
        return RolloutState(
            next_id=self._groups.next_id,
            groups=[group.saved() for group in self._groups.training],
            in_flight=in_flight,
            prefetched=self._ahead,
            prefetched_samples=self._num_samples_ahead if self._ahead else 0,
            versions=list(versions),
            drawn=self.drawn,
        )

    def load(self, state: RolloutState, local: LocalRolloutState, prompt_of: Callable[[int], Prompt]) -> None:
        """Implements `RolloutSource.load`; samples that this job would draw in another way are generated again."""
        if changed := state.changed(self.drawn):
            if dist.get_rank() == 0:
                log.warning("samples of the checkpoint are generated again, for another %s", ", ".join(changed))
            if local.ready is not None:  # their prompts are not drawn yet
                state = state.model_copy(update={"prefetched": [], "prefetched_samples": 0})
            local = LocalRolloutState()
        self._load(state, local, prompt_of)

    def _load(self, state: RolloutState, local: LocalRolloutState, prompt_of: Callable[[int], Prompt]) -> None:
        """Restores the groups of a checkpoint; complete samples are scored again."""
        # Only a rank with an engine can continue samples; a resumed job may have engines on other ranks.
        partial = local.partial if self._engines.engine is not None else {}
        # A checkpoint may be resumed by fewer ranks: what no rank has loaded is missing, and generated again.
        reports = all_gather_json([list(local.completed), list(partial)])
        everywhere = ({i for report in reports for i in report[which]} for which in (0, 1))
        self._groups.load(state, prompt_of, local.completed, partial, *everywhere)
        self._ahead, self._num_samples_ahead = list(state.prefetched), state.prefetched_samples
        for sample in self._groups.completed.values():
            self._score(sample)


# -- rows


def group_rows(
    groups: Sequence[Group],
    completed: Mapping[int, Sample],
    score_ids: Mapping[int, int] | None,
    policy_version: int,
    columns: OptionalColumns = PLAIN,
) -> GeneratedRows:
    """Returns the rows of the samples that this rank's engine has generated; groups are in the order of their ids.

    `score_ids` has the number of each sample's score on this rank, None where nothing is scored. See `samples_to_batch`
    for the rest. A group is the samples of a prompt, or where agents have names the trajectories of one agent.
    """
    pairs = [(group, i) for group in groups for i in group.ids if i in completed]
    samples = [completed[i] if sample_number(i) == i else replace(completed[i], id=sample_number(i)) for _, i in pairs]
    prompts = [group.prompt for group, _ in pairs]
    batch = samples_to_batch(prompts, samples, policy_version, columns)
    pair_of = {sample_number(i): (group, i) for group, i in pairs}
    episodes = without_agent(batch["trajectory"])
    of_rows = [pair_of[number] for number in episodes.tolist()]
    of_prompt = torch.tensor([sample_number(group.ids.start) for group, _ in of_rows], dtype=torch.int64)
    batch["group"] = of_prompt + batch["trajectory"] - episodes
    put_origin(batch, None if score_ids is None else [score_ids.get(i, NOT_SCORED) for _, i in of_rows])
    texts = {sample.id: json.dumps(conversation_of(sample.trajectory)) for sample in samples if sample.trajectory}
    return GeneratedRows(batch, texts)


def distribute_rows(generated: GeneratedRows, groups: Sequence[Group], rows: RowIndexer) -> GeneratedRows:
    """Returns this rank's share of all rows: whole groups in the order of their ids, about equally many rows."""
    # Group statistics and sums over trajectories then need no communication.
    index = rows.index(generated.batch)
    starts = [sample_number(group.ids.start) for group in groups]
    episodes = [without_agent(trajectory) for trajectory in index.trajectories]
    shares = _shares(episodes, starts, dist.get_world_size())
    mine = gather_rows(generated.batch, index, shares)
    rows.put(mine, index, shares)  # the rows are known, so the first role call need not index them again
    conversations: Mapping[int, str] = {}
    if "prefix_of" in index.schema:  # the rows are of agents, on all ranks
        by_rank = [sorted({episodes[row] for row in share}) for share in shares]
        conversations = exchange_conversations(generated.conversations, by_rank)
    return GeneratedRows(mine, conversations)


def _shares(episodes: Sequence[int], groups: Sequence[int], count: int) -> list[range]:
    """Returns ranges of rows, each of whole groups, that end at the group's end nearest to an equal share."""
    # Groups 0, 2 and 4 with 2, 3 and 2 rows on 2 ranks: rows 0 to 1, and 2 to 6. A rank may get none.
    sizes = Counter(bisect_right(groups, episode) - 1 for episode in episodes)
    ends = [0, *accumulate(sizes[group] for group in range(len(groups)))]
    # A group belongs to the share in which its middle is; integers, scaled by 2 * count, are exact on every rank.
    middles = [count * (before + after) for before, after in pairwise(ends)]
    edges = [ends[bisect_left(middles, 2 * rank * ends[-1])] for rank in range(count)]
    return [range(*edge) for edge in pairwise([*edges, ends[-1]])]


def put_origin(batch: Batch, score_ids: Sequence[int] | None) -> None:
    """Sets the columns by which `RewardRole.wait` identifies the score of a row of this rank's engine."""
    batch.put("generated_by", torch.full((len(batch),), dist.get_rank(), dtype=torch.int64), ColumnKind.SEQUENCE)
    if score_ids is not None:
        batch.put("score_id", torch.tensor(score_ids, dtype=torch.int64), ColumnKind.SEQUENCE)
