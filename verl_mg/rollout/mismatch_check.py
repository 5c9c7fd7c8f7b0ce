"""Check of the engines against the trainer, by the first samples after a start, before anything trains on them.

    engines ──▶ rows that `generate` returns first ──▶ log-probs by the actor, of tokens that its present weights wrote
                    mean |difference| over all ranks above the bound: all ranks raise, and name the worst sample

A resumed job is checked too: its engines are new, and may have another version, layout or device than before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_mg import device
from verl_mg.algorithms import mismatch
from verl_mg.algorithms.aggregation import segment_totals
from verl_mg.batch import Batch
from verl_mg.config import Config, MaxMismatch
from verl_mg.data.prompt_feed import PromptFeed
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.errors import UserError
from verl_mg.roles.models import Actor

FLOAT32, HALF, COARSE = 1e-3, 0.05, 0.2  # nats; 0.0044 was measured in bfloat16
"""Bounds in float32, in 16 bits, and for `Precision.is_coarse`."""
WHOLE = ("auto", "float32", "float16", "bfloat16", "bf16")
"""Types of keys and values that are not quantized, by the names of engines."""


@dataclass(frozen=True)
class Precision:
    """Settings and device on which it depends how close the log-probs of engine and trainer can be."""

    dtype: torch.dtype
    engine: str
    cache: str
    """Type of the engine's keys and values, by its own name."""
    wire: str
    """`rollout.wire`; all but cast are quantized weights of the engine."""
    trains_in_fp8: bool
    has_experts: bool
    replays_routing: bool
    """Whether the trainer takes the experts that the engine has selected."""
    device: str
    """Type of the trainer's device."""

    @classmethod
    def of(cls, actor: Actor, config: Config) -> Precision:
        """Returns the precision of a job on this rank's device."""
        fields, rollout = config.megatron.transformer, config.rollout
        return cls(
            dtype=actor.runner.dtype,
            engine=rollout.engine,
            cache=str(rollout.engine_arguments.get("kv_cache_dtype", "auto")),
            wire=rollout.wire,
            trains_in_fp8=bool(fields.get("fp8") or fields.get("fp4")),
            has_experts=actor.runner.table.config.experts is not None,
            replays_routing=rollout.replay_routing,
            device=device.current_device().type,
        )

    @property
    def is_coarse(self) -> bool:
        """Whether engine and trainer compute with other weights, keys and values, or experts."""
        quantizes = self.wire != "cast" or self.trains_in_fp8 or self.cache not in WHOLE
        return quantizes or self.selects_experts_twice

    @property
    def selects_experts_twice(self) -> bool:
        """Whether engine and trainer each select experts: near ties fall differently."""
        return self.has_experts and not self.replays_routing


def largest_mismatch(setting: MaxMismatch, precision: Precision) -> float | None:
    """Returns the bound in nats of `rollout.max_mismatch`; None: there is none."""
    if not isinstance(setting, str):
        return setting
    # GPU: rollout.max_mismatch=auto has a bound, so the actor computes the log-probs of the first samples of a start.
    # GPU-TEST: tests/rollout/test_mismatch_check.py::test_bound_by_default_is_that_of_the_precision,
    # tests/rollout/test_mismatch_check.py::test_wrong_logprob_on_a_gpu_ends_the_job_by_default
    # GPU-RAN: not yet
    if precision.device != "cuda":
        return None
    if precision.is_coarse:
        return COARSE
    return FLOAT32 if precision.dtype is torch.float32 else HALF


class MismatchCheck:
    """Compares the first rows that have tokens of the trainer's present weights; all ranks call it together."""

    # Rows of async and partial rollouts may also have tokens of earlier weights, which cannot be compared.

    def __init__(self, setting: MaxMismatch, precision: Precision, actor: Actor, prompts: PromptFeed) -> None:
        self._setting, self._precision, self._actor, self._prompts = setting, precision, actor, prompts
        self._bound = largest_mismatch(setting, precision)

    def __call__(self, batch: Batch) -> None:
        """Raises UserError on all ranks where the rows of all ranks differ by more than the bound."""
        if self._bound is None:
            return
        mask = batch["loss_mask"] & (batch["policy_versions"] == self._actor.num_updates)
        if not any(all_gather_json(bool(mask.any()))):
            return
        ours, theirs = self._actor.compute_logprobs(batch), batch["rollout_logprobs"]
        statistics = mismatch.statistics(ours, theirs, mask, batch.positions)
        reports = all_gather_json([statistics, _worst_sample(batch, ours, mask)])
        whole = mismatch.merge(report[0] for report in reports)
        mean = mismatch.summarize(whole)["mean_abs"]
        if not mean <= self._bound:  # nor is NaN
            worst = max((report[1] for report in reports if report[1]), key=lambda sample: sample["mean"])
            raise UserError(self._message(mean, int(whole["tokens"]), worst))
        self._bound = None  # compared once

    def _message(self, mean: float, tokens: int, worst: dict[str, Any]) -> str:
        remedies = ["rollout.engine=hf"] if self._precision.engine != "hf" else []
        remedies += ["rollout.wire=cast"] if self._precision.wire != "cast" else []
        remedies += ["another kv_cache_dtype"] if self._precision.cache not in WHOLE else []
        remedies += ["rollout.replay_routing=true"] if self._precision.selects_experts_twice else []
        tried = f"Try {', '.join(remedies)} as" if remedies else "Look for the cause as"
        return (
            f"rollout.max_mismatch={self._setting}: log-probs of engine and trainer differ by {mean:.3g} nats on "
            f"average over the first {tokens} tokens, more than {self._bound:g}. The worst sample, sample_id "
            f"{worst['sample_id']} of the prompt {self._prompts.by_id(worst['prompt_id']).where}, differs by "
            f"{worst['mean']:.3g}: at position {worst['position']} of its {worst['length']} tokens the engine has "
            f"{worst['engine']:.7g} and the trainer {worst['trainer']:.7g}. {tried} docs/guides/debug_a_mismatch.md "
            "says, or train in spite of it with a larger rollout.max_mismatch, or null for none."
        )


def _worst_sample(batch: Batch, trainer: Tensor, mask: Tensor) -> dict[str, Any] | None:
    """Returns the row of this rank with the largest mean difference under the mask, and its worst token."""
    if not mask.any():
        return None
    difference = (
        (trainer - batch["rollout_logprobs"]).abs().double().nan_to_num(nan=torch.inf).clamp(max=mismatch.LARGEST)
    )
    rows, entries = batch.sequence_ids[mask], mask.nonzero().flatten()
    means = segment_totals(difference[mask], rows) / segment_totals(torch.ones(len(rows)), rows)
    row = rows[means.argmax()]
    entry = entries[(difference[mask] * (rows == row)).argmax()]
    return {
        "sample_id": int(batch["sample_id"][row]),
        "prompt_id": int(batch["prompt_id"][row]),
        "mean": float(means.max()),
        "position": int(batch.positions[entry]),
        "length": int(batch.lengths[row]),
        "engine": float(batch["rollout_logprobs"][entry]),
        "trainer": float(trainer[entry]),
    }
