"""The rollout as a recipe sees it: prompts in, a `Batch` spread over the ranks out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from verl_mg import platform
from verl_mg.batch import Batch
from verl_mg.data.prompts import Prompt
from verl_mg.megatron.collectives import sum_over_ranks
from verl_mg.reshard import Schedule, aliases, execute, plan, schedule, shared
from verl_mg.roles.actor import Actor
from verl_mg.rollout import Request, RolloutEngine, Sample, Sampling


class Rollout:
    """A rollout engine on every rank, each answering its share of the prompts."""

    def __init__(self, engine: RolloutEngine, sampling: Sampling, seed: int) -> None:
        self._engine, self._sampling, self._seed = engine, sampling, seed
        self._next_id = 0
        self._schedule: Schedule | None = None
        self._lower_bound = 0
        self.produced: list[Batch] = []
        self.metrics: dict[str, float] = {}

    def generate(self, prompts: Sequence[Prompt], samples: int = 1) -> Batch:
        """`samples` responses to each prompt; all ranks call it with the same prompts and get different rows.

        Columns: tokens, loss_mask, rollout_logprobs, prompt_id, prompt_length, group, sample_id, version, truncated.
        A sample depends on the job's seed and its sample id, not on how many ranks there are.
        """
        batch = self._answer(prompts, samples, self._sampling)
        self.produced.append(batch)
        return batch

    def greedy(self, prompts: Sequence[Prompt]) -> Batch:
        """The most probable response to each prompt, for evaluation; the samples of training stay the same."""
        batch = self._answer(prompts, 1, replace(self._sampling, temperature=0.0))
        self._next_id -= len(prompts)
        return batch

    def sync(self, actor: Actor) -> None:
        """Bring the actor's weights into the engine, each byte that a rank lacks once."""
        self._engine.begin_update()
        if self._schedule is None:
            self._schedule = self._plan_sync(actor)
        traffic = execute(self._schedule, actor.network.parameters(), self._engine.parameters())
        self._engine.end_update(actor.updates)
        moved = {"sync/bytes_received": traffic.bytes_received, "sync/bytes_lower_bound": self._lower_bound}
        self.metrics = sum_over_ranks([moved]) | {
            "time/sync": traffic.seconds,
            "time/sync_packing": traffic.seconds_packing,
            "time/sync_waiting": traffic.seconds_waiting,
        }

    def _plan_sync(self, actor: Actor) -> Schedule:
        """Made once: layouts do not change between iterations."""
        rank, ranks, dtype = dist.get_rank(), range(dist.get_world_size()), actor.network.dtype
        target = actor.network.table.on_modules(ranks)
        moves = plan(actor.network.holdings(), target, platform.ranks_of_a_node(len(ranks)))
        self._lower_bound = moves.lower_bound(rank, dtype.itemsize)
        self._engine.share(shared(aliases(moves, rank), actor.network.parameters()))
        return schedule(moves, rank, dtype)

    def _answer(self, prompts: Sequence[Prompt], samples: int, sampling: Sampling) -> Batch:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = range(rank * len(prompts) // ranks, (rank + 1) * len(prompts) // ranks)
        requests = [
            Request(sample_id, prompts[i].tokens, self._seed_of(sample_id))
            for i in mine
            for sample_id in range(self._next_id + i * samples, self._next_id + (i + 1) * samples)
        ]
        first_group = self._next_id
        self._next_id += len(prompts) * samples
        answers = self._engine.generate(requests, sampling)
        asked = [prompts[i] for i in mine for _ in range(samples)]
        batch = _as_batch(asked, answers)
        # The first sample of a prompt names its group.
        batch["group"] = first_group + (batch["sample_id"] - first_group) // samples * samples
        return batch

    def _seed_of(self, sample_id: int) -> int:
        digest = hashlib.blake2b(f"{self._seed}:{sample_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) >> 1


def _as_batch(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Batch:
    """Prompt and response side by side; everything but `group`."""
    batch = Batch.from_rows((*p.tokens, *s.tokens) for p, s in zip(prompts, samples, strict=True))
    batch["prompt_length"] = torch.tensor([len(prompt.tokens) for prompt in prompts], dtype=torch.int64)
    batch["prompt_id"] = torch.tensor([prompt.id for prompt in prompts], dtype=torch.int64)
    batch["sample_id"] = torch.tensor([sample.id for sample in samples], dtype=torch.int64)
    batch["version"] = torch.tensor([sample.version for sample in samples], dtype=torch.int64)
    batch["truncated"] = torch.tensor([sample.finish == "length" for sample in samples], dtype=torch.bool)
    batch["loss_mask"] = batch.positions >= batch.spread(batch["prompt_length"])
    logprobs = torch.zeros(batch.total_tokens)
    logprobs[batch["loss_mask"]] = torch.tensor([value for sample in samples for value in sample.logprobs])
    batch["rollout_logprobs"] = logprobs
    return batch
