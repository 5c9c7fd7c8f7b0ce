"""The rollout as a recipe sees it: prompts in, a `Batch` spread over the ranks out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore

from verl_mg.batch import Batch
from verl_mg.data.prompts import Prompt
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.errors import UserError
from verl_mg.roles.context import JobContext
from verl_mg.roles.engine_group import EngineGroup
from verl_mg.roles.models import Actor
from verl_mg.roles.pending_groups import PendingGroup, RolloutState
from verl_mg.roles.reward import RewardRole
from verl_mg.roles.rollout_record import RolloutRecord
from verl_mg.roles.row_dispatch import build_row_index, gather_rows
from verl_mg.rollout.engine import NOT_GENERATED, Request, Sample, Sampling
from verl_mg.rollout.engine_loop import EngineLoop
from verl_mg.rollout.work_queue import WorkQueue, complete_groups


@dataclass(frozen=True)
class _Call:
    """Samples that are being drawn. ready, open_groups: indices of prompts that are complete, and that are not."""

    asked: Sequence[PendingGroup]
    ready: Sequence[int]
    open_groups: Sequence[int]
    enough: int
    deal: WorkQueue
    shift: EngineLoop


class Rollout:
    """Engines that answer prompts together. Every rank calls every method.

    partial: samples that were cut go on in the next call; otherwise their prompts are given up. scorer: scores samples
    while others are still being written. cuts: whether it may keep the prompts that were answered first.
    """

    def __init__(
        self,
        fleet: EngineGroup,
        sampling: Sampling,
        seed: int,
        context: JobContext,
        partial: bool = False,
        scorer: RewardRole | None = None,
        cuts: bool = True,
    ) -> None:
        self._scorer, self._cuts = scorer, cuts
        self._fleet, self._sampling, self._seed, self._partial = fleet, sampling, seed, partial
        self._context, self._store = context, PrefixStore("rollout", context.store)
        self._next_id = self._calls = 0
        self._waiting: list[PendingGroup] = []
        # This rank's engine wrote them, and their groups are not complete.
        self._done: dict[int, Sample] = {}
        self._cut: dict[int, Sample] = {}
        self._call: _Call | None = None
        self._ready: Batch | None = None
        self._newer: Actor | None = None
        """Whose weights the engines are given when the samples that they draw are done."""
        self._to_draw: int | None = None
        self.produced: list[Batch] = []
        self.handed: list[RolloutRecord] = []
        self.metrics: dict[str, float] = {}

    def enter(self, iteration: int) -> None:
        """An iteration begins: `produced`, the batches to train on, and `handed`, all batches, are those of it."""
        self.produced, self.handed = [], []

    @property
    def unfinished(self) -> int:
        """Prompts that the next call goes on with."""
        return len(self._waiting)

    def generate(self, prompts: Sequence[Prompt], samples: int = 1, keep: int | None = None) -> Batch:
        """`samples` responses to each prompt; all ranks call it with the same prompts and get different rows.

        With `keep` the first `keep` prompts whose samples are all done are returned, those of earlier calls
        included, and the engines are cut; `unfinished` tells what is left.
        Columns: tokens, loss_mask, rollout_logprobs, policy_versions, prompt_id, prompt_length, group, sample_id,
        policy_version, truncated, routed_experts where the engines tell, and with a scorer what that says, see
        `RewardRole.columns`.
        A sample depends on the job's seed and its sample id, not on how many ranks there are, where the engine can.
        """
        self.begin(prompts, samples, keep)
        return self.finish()

    def begin(self, prompts: Sequence[Prompt], samples: int = 1, keep: int | None = None, ahead: bool = False) -> None:
        """`generate` that returns at once: `finish` brings the samples.

        ahead: they are drawn meanwhile, from the weights that the engines have now; a `sync` before `finish` waits for
        it. UserError where the engines share their ranks with training.
        """
        if self.drawing:
            raise RuntimeError("what was begun comes first: call finish")
        if ahead and not self._fleet.apart:
            raise UserError(
                "samples are drawn while training computes only by engines on ranks of their own: write "
                "rollout.engine=sglang and rollout.num_ranks, or rollout.urls, or leave one_step_off out"
            )
        self._call = self._open(self._waiting + self._ask(prompts, samples), self._sampling, keep)
        if ahead:
            self._call.shift.ahead()

    def finish(self) -> Batch:
        """What `begin` asked for."""
        # A rank's batch may have no rows, and is no less one.
        batch, self._ready = self._finished() if self._ready is None else self._ready, None
        self.produced.append(batch)
        self.handed.append(RolloutRecord.of(batch))
        return batch

    @property
    def drawing(self) -> bool:
        """Whether there is something to `finish`."""
        return self._call is not None or self._ready is not None

    def greedy(self, prompts: Sequence[Prompt]) -> Batch:
        """The most probable response to each prompt; see `aside`."""
        return self.aside(prompts, 1, 0.0)

    def aside(self, prompts: Sequence[Prompt], samples: int, temperature: float) -> Batch:
        """Responses that are not trained on; the samples of training stay the same."""
        if self._call:
            self._ready = self._finished()
        asked = self._ask(prompts, samples)
        self._next_id -= len(prompts) * samples
        metrics = dict(self.metrics)
        batch, _ = self._close(self._open(asked, replace(self._sampling, temperature=temperature), None))
        self.metrics = metrics
        self.handed.append(RolloutRecord.of(batch))
        return batch

    def sync(self, actor: Actor) -> None:
        """Bring the actor's weights into the engines, each byte that a rank lacks once."""
        self._context.executor.require_outside_block("rollout.sync")
        if self._call:
            self._newer = actor
        else:
            with self._context.timer("weight_sync"):
                self.metrics |= self._fleet.sync(actor)

    def close(self) -> None:
        """End the engines that this job has started."""
        self._fleet.close()

    # -- over the end of a process

    def state(self) -> RolloutState:
        """What all ranks know of samples that are not finished; see `kept` for what this one holds of them."""
        drawing = self._call
        return RolloutState(
            next_id=self._next_id,
            waiting=[one.state() for one in (drawing.asked if drawing else self._waiting)],
            drawing=drawing.enough if drawing else None,
        )

    @property
    def kept(self) -> tuple[Mapping[int, Sample], Mapping[int, Sample], Batch | None]:
        """Samples that this rank's engine has finished, those that it has begun, and rows that wait for `finish`."""
        return self._done, self._cut, self._ready

    def load(
        self,
        state: RolloutState,
        prompt_of: Callable[[int], Prompt],
        done: Mapping[int, Sample],
        cut: Mapping[int, Sample],
        ready: Batch | None,
    ) -> None:
        """Go on from there, with this rank's part; all ranks call it together, before the first `sync`.

        What was in flight begins anew; samples that wait for the rest of their group are scored again.
        """
        told = all_gather_json([list(done), list(cut)])
        there, begun = ({i for own in told for i in own[which]} for which in (0, 1))
        self._next_id = state.next_id
        self._waiting = [PendingGroup.of(one, prompt_of, there, begun) for one in state.waiting]
        self._to_draw, self._ready = state.drawing, ready
        known = {i for one in self._waiting for i in one.done | one.begun}
        self._done = {i: sample for i, sample in done.items() if i in known}
        self._cut = {i: sample for i, sample in cut.items() if i in known}
        owner = {i: one.prompt for one in self._waiting for i in one.ids}
        for i, sample in self._done.items():
            if self._scorer and i in owner:
                self._scorer.begin(owner[i], sample)

    def go_on(self) -> None:
        """After the first `sync`: draw ahead what was being drawn ahead."""
        if self._to_draw is not None:
            asked, self._waiting = self._waiting, []
            keep, self._to_draw = self._to_draw, None
            self._call = self._open(asked, self._sampling, keep)
            self._call.shift.ahead()

    def _ask(self, prompts: Sequence[Prompt], samples: int) -> list[PendingGroup]:
        first, self._next_id = self._next_id, self._next_id + len(prompts) * samples
        return [PendingGroup(p, range(first + i * samples, first + (i + 1) * samples)) for i, p in enumerate(prompts)]

    def _finished(self) -> Batch:
        assert self._call is not None
        call, self._call = self._call, None
        batch, self._waiting = self._close(call)
        if self._newer is not None:
            actor, self._newer = self._newer, None
            self.sync(actor)
        return batch

    def _open(self, asked: Sequence[PendingGroup], sampling: Sampling, keep: int | None) -> _Call:
        """Give the engines their first work."""
        self._context.executor.require_outside_block("rollout.generate")
        enough = len(asked) if keep is None else min(keep, len(asked))
        if enough < len(asked) and not self._cuts:
            raise UserError(
                "job.deterministic=true: which prompts are answered first is a matter of time; write "
                "algorithm.oversampling=0, so that all are kept"
            )
        ready = [i for i, one in enumerate(asked) if not one.group.size]
        open_groups = [i for i, one in enumerate(asked) if one.group.size]
        prompt_of = {i: one.prompt for one in asked for i in one.ids}
        self._calls += 1
        key = f"rollout/{self._calls}"
        deal = self._fleet.deal(self._store, key, [asked[i].group for i in open_groups], max(0, enough - len(ready)))

        def request_of(sample: int) -> Request:
            return Request(sample, prompt_of[sample].tokens, self._seed_of(sample), self._cut.pop(sample, None))

        def finished(sample: Sample) -> None:
            self._context.timer.progress += 1  # a long call goes on, sample by sample
            if self._scorer:
                self._scorer.begin(prompt_of[sample.id], sample)

        begun = [request_of(i) for i in sorted(self._cut.keys() & prompt_of.keys())]
        self._fleet.ready()
        shift = EngineLoop(self._fleet.engine, self._fleet.engines, deal, self._store, key, self._fleet, finished)
        shift.begin(begun, request_of, sampling)
        return _Call(asked, ready, open_groups, enough, deal, shift)

    def _close(self, call: _Call) -> tuple[Batch, list[PendingGroup]]:
        """The rows of the first `enough` prompts to be complete, at home on this rank, and the prompts that wait."""
        asked, ready = call.asked, call.ready
        orders, done, cut = self._work(call)
        missing = call.enough - len(ready)
        kept = sorted([*ready, *(call.open_groups[g] for g in complete_groups(orders, missing))][: call.enough])
        untouched = len(kept) == len(asked) and not any(one.done or one.begun for one in asked)
        with self._context.timer("row_dispatch"):
            home = self._bring_home([asked[i] for i in kept], untouched)
        waiting = [
            replace(one, done=one.done | (done & set(one.ids)), begun=frozenset(cut & set(one.ids)))
            for i, one in enumerate(asked)
            if self._partial and i not in set(kept)
        ]
        # Other calls' samples stay: an evaluation comes between the parts of a sample that was cut.
        gone = {i for one in asked for i in one.ids} - {i for one in waiting for i in one.ids}
        self._done = {i: sample for i, sample in self._done.items() if i not in gone}
        self._cut = {i: sample for i, sample in self._cut.items() if i not in gone}
        if self._scorer:
            self._scorer.forget(list(gone))
        return home, waiting

    def _work(self, call: _Call) -> tuple[list[dict[int, int]], set[int], set[int]]:
        """Run the engines; the orders in which ranks completed groups, and all samples that are done, and cut."""
        with self._context.timer("generate"):
            work = call.shift.run()
        self._context.timer.barrier("generate")
        self._done |= work.done
        self._cut |= {i: sample for i, sample in work.cut.items() if sample.tokens}
        told = all_gather_json(
            {
                "done": list(work.done),
                "cut": list(self._cut),
                "order": list(call.deal.order.items()),
                "tokens": work.tokens,
                "busy": work.busy_seconds,
                "deaths": work.deaths,
            }
        )
        call.deal.forget()
        self._measure(told)
        orders = [{group: place for group, place in own["order"]} for own in told]
        return orders, {i for own in told for i in own["done"]}, {i for own in told for i in own["cut"]}

    def _measure(self, told: Sequence[dict[str, float]]) -> None:
        """How even the engines' work was: seconds and tokens of the busiest one over the mean."""
        engines = [own for own, leads in zip(told, self._fleet.leads, strict=True) if leads]
        self.metrics |= {
            "time/busiest_engine": _over_mean([own["busy"] for own in engines]),
            "rollout/busiest_engine": _over_mean([own["tokens"] for own in engines]),
            "rollout/engine_deaths": sum(own["deaths"] for own in told),
            "time/rollout_busy": max(own["busy"] for own in told),
        }

    def _bring_home(self, kept: Sequence[PendingGroup], untouched: bool) -> Batch:
        """This rank's rows of the kept groups, straight from the engines that wrote them.

        untouched: all groups that were dealt are kept, and were begun in this call.
        """
        mine = [(one, i) for one in kept for i in one.ids if i in self._done]
        batch = _as_batch([one.prompt for one, _ in mine], [self._done[i] for _, i in mine], self._fleet.version)
        batch["group"] = torch.tensor([one.ids.start for one, _ in mine], dtype=torch.int64)
        if self._scorer:
            self._scorer.add_columns(batch)
        if untouched and self._fleet.at_home:
            return batch
        index = build_row_index(batch)
        ranks = dist.get_world_size()
        # Rows of the index stand in the order of the sample ids, as the kept groups do.
        ends = [0]
        for one in kept:
            ends.append(ends[-1] + len(one.ids))
        edges = [ends[rank * len(kept) // ranks] for rank in range(ranks + 1)]
        return gather_rows(batch, index, [range(*edge) for edge in pairwise(edges)])

    def _seed_of(self, sample_id: int) -> int:
        digest = hashlib.blake2b(f"{self._seed}:{sample_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) >> 1


def _over_mean(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values) if any(values) else 1.0


def _as_batch(prompts: Sequence[Prompt], samples: Sequence[Sample], version: int) -> Batch:
    """Prompt and response side by side; everything but `group`. `version`: that of a response of no token."""
    batch = Batch.from_rows((*p.tokens, *s.tokens) for p, s in zip(prompts, samples, strict=True))
    batch["prompt_length"] = torch.tensor([len(prompt.tokens) for prompt in prompts], dtype=torch.int64)
    batch["prompt_id"] = torch.tensor([prompt.id for prompt in prompts], dtype=torch.int64)
    batch["sample_id"] = torch.tensor([sample.id for sample in samples], dtype=torch.int64)
    oldest = [min((v for v in sample.policy_versions if v != NOT_GENERATED), default=version) for sample in samples]
    batch["policy_version"] = torch.tensor(oldest, dtype=torch.int64)
    batch["truncated"] = torch.tensor([sample.finish != "stop" for sample in samples], dtype=torch.bool)
    response = batch.positions >= batch.expand_to_tokens(batch["prompt_length"])
    batch["policy_versions"] = torch.full((batch.total_tokens,), NOT_GENERATED, dtype=torch.int64)
    batch["policy_versions"][response] = torch.tensor(
        [v for sample in samples for v in sample.policy_versions], dtype=torch.int64
    )
    batch["loss_mask"] = batch["policy_versions"] != NOT_GENERATED
    logprobs = torch.zeros(batch.total_tokens)
    logprobs[response] = torch.tensor([value for sample in samples for value in sample.logprobs])
    batch["rollout_logprobs"] = logprobs
    if samples and samples[0].routed_experts is not None:
        lengths = batch.lengths.tolist()
        batch["routed_experts"] = torch.cat([_routing(s, n) for s, n in zip(samples, lengths, strict=True)])
    return batch


def _routing(sample: Sample, length: int) -> Tensor:
    """(length, layers, top_k) int16; -1 for tokens that the engine never fed, the last one among them."""
    told = sample.routed_experts
    assert told is not None
    return torch.cat([told, told.new_full((length - len(told), *told.shape[1:]), -1)])
