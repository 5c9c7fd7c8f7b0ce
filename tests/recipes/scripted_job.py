"""A job whose rollouts are scripted: a recipe's iteration runs on it without models, on any number of ranks."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.distributed import collectives
from verl_mg.job.job import RunningJob


class ScriptedRole:
    """A role with constant outputs that keeps the batches of its updates."""

    def __init__(self, metrics: Mapping[str, float] | None = None) -> None:
        self.batches: list[Batch] = []
        self.calls: list[str] = []
        self._metrics = metrics or {}

    def compute_logprobs(self, batch: Batch, squares: bool = False) -> Tensor:
        self.calls.append("compute_logprobs")
        return torch.full((batch.total_tokens, 2) if squares else (batch.total_tokens,), -1.0)

    def compute_values(self, batch: Batch) -> Tensor:
        return torch.zeros(batch.total_tokens)

    def update(self, batch: Batch, *arguments: Any, **options: Any) -> dict[str, float]:
        self.calls.append("update")
        self.batches.append(batch)
        return dict(self._metrics)


class ScriptedJob:
    """Job with an actor, a critic, a reference, a process reward model, and rollouts that `generate(round)` makes."""

    _recipe = "scripted"
    warn = RunningJob.warn

    def __init__(self, generate: Callable[[int], Batch]) -> None:
        self.iteration, self.rounds = 1, 0
        self.state: dict[str, float | Batch] = {}
        self.requested_prompts: list[int] = []
        self.config = SimpleNamespace(job=SimpleNamespace(seed=4), rollout=SimpleNamespace(max_new_tokens=8))
        self.actor, self.reference, self.process_reward = ScriptedRole(), ScriptedRole(), ScriptedRole()
        self.critic = ScriptedRole(
            {f"critic/{name}": 0.0 for name in ("return", "return_squared", "value_error", "value_error_squared")}
        )
        self.prompts = SimpleNamespace(next_batch=self._next_batch)
        self.rollout = SimpleNamespace(generate=self._generate, update_weights=lambda actor: None)
        self.reward = SimpleNamespace(wait=lambda batch: batch["scripted_reward"])
        self.all_reduce_sum = collectives.all_reduce_sum
        self.global_kth_largest = collectives.global_kth_largest
        self.all_gather_column = collectives.all_gather_column
        self.reassign_sample_ids = collectives.reassign_sample_ids
        self._script = generate

    def concurrent_roles(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _next_batch(self, n: int) -> list[int]:
        self.requested_prompts.append(n)
        return list(range(n))

    def _generate(self, prompts: list[int], num_samples: int) -> Batch:
        batch = self._script(self.rounds)
        self.rounds += 1
        return batch


def rows(sample_ids: list[int], groups: list[int], rewards: list[float]) -> Batch:
    """Batch of rows of one prompt token and one response token."""
    batch = Batch.from_rows([(1, 2)] * len(sample_ids))
    batch["sample_id"] = torch.tensor(sample_ids, dtype=torch.int64)
    batch["trajectory"] = batch["sample_id"].clone()
    batch["group"] = torch.tensor(groups, dtype=torch.int64)
    batch["loss_mask"] = torch.tensor([False, True] * len(sample_ids), dtype=torch.bool)
    batch["prompt_length"] = torch.ones(len(sample_ids), dtype=torch.int64)
    batch.put("scripted_reward", torch.tensor(rewards), batch.kind("group"))
    return batch
