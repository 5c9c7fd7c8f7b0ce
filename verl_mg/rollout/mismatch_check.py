"""Check of the engines against the trainer, by the first tokens after a start, before anything trains on them.

    engines ──▶ the end of a row that is as long as the job allows  ──▶ log-probs by the actor, of tokens that its
            ──▶ rows that `generate` returns first                  ──▶ present weights wrote
                    mean |difference| over all ranks above the bound: all ranks raise, and name the worst row, and what
                    `transformers` reads in config.json, but the engine's model does not

The first rows may be short; the long one reaches every window and original length that rows of the job can reach. It is
the only request in flight, greedy, so it draws no random number, and no prompt begins like it, so no cache is shared:
samples are the same without it. Engines in the rank's process compute with the module of `transformers`, and get none.
A resumed job is checked too: its engines are new, and may have another version, layout or device than before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.algorithms import mismatch
from verl_mg.algorithms.aggregation import segment_totals
from verl_mg.batch import Batch
from verl_mg.config import Config, MaxMismatch
from verl_mg.data.prompt_feed import PromptFeed
from verl_mg.data.prompts import Prompt
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.engines.engine import Request, Sampling
from verl_mg.engines.kinds import ENGINES
from verl_mg.errors import UserError
from verl_mg.roles.models import Actor, Policy
from verl_mg.rollout.engine_group import EngineGroup
from verl_mg.rows.samples import OptionalColumns, samples_to_batch
from verl_mg.tracing.config_reads import unread_fields
from verl_mg.tracing.tracer import TracedEngine

FLOAT32, FLOAT32_EXPERTS, HALF, COARSE = 1e-3, 0.01, 0.05, 0.2  # nats; 0.0044 was measured in bfloat16
"""Bounds in float32, without and with experts or keys that are selected twice, in 16 bits, and for
`Precision.is_coarse`."""
NEW_TOKENS = 16  # compared tokens at the end of the longest row
WHOLE = ("auto", "float32", "float16", "bfloat16", "bf16")
"""Types of keys and values that are not quantized, by the names of engines."""


@dataclass(frozen=True)
class Precision:
    """Settings on which it depends how close the log-probs of engine and trainer can be."""

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
    has_indexer: bool = False  # whether attention is to keys that are selected
    replays_selections: bool = False  # whether the trainer takes the keys that the engine has selected

    @classmethod
    def of(cls, actor: Actor, config: Config) -> Precision:
        """Returns the precision of a job."""
        fields, rollout = config.megatron.transformer, config.rollout
        return cls(
            dtype=actor.runner.dtype,
            engine=rollout.engine,
            cache=str(rollout.engine_arguments.get("kv_cache_dtype", "auto")),
            wire=rollout.wire,
            trains_in_fp8=bool(fields.get("fp8") or fields.get("fp4")),
            has_experts=actor.runner.table.config.experts is not None,
            replays_routing=rollout.replay_routing,
            has_indexer=actor.runner.table.config.indexer is not None,
            replays_selections=rollout.replay_selections,
        )

    @property
    def is_coarse(self) -> bool:
        """Whether engine and trainer compute with other weights, keys and values, or often with other choices."""
        quantizes = self.wire != "cast" or self.trains_in_fp8 or self.cache not in WHOLE
        return quantizes or (bool(self.selects_twice) and self.dtype is not torch.float32)

    @property
    def selects_twice(self) -> list[str]:
        """Keys without which engine and trainer each select: near ties fall differently, few of them in float32."""
        keys = ["replay_routing"] if self.has_experts and not self.replays_routing else []
        return keys + (["replay_selections"] if self.has_indexer and not self.replays_selections else [])


def largest_mismatch(setting: MaxMismatch, precision: Precision) -> float | None:
    """Returns the bound in nats of `rollout.max_mismatch`; None: there is none."""
    if not isinstance(setting, str):
        return setting
    if precision.is_coarse:
        return COARSE
    if precision.dtype is not torch.float32:
        return HALF
    return FLOAT32_EXPERTS if precision.selects_twice else FLOAT32


def probe_tokens(prompts: Iterable[Prompt], length: int, excluded: Collection[int] = ()) -> tuple[int, ...]:
    """Returns `length` tokens of the prompts, one after another, that begin as no prompt does; without `excluded`."""
    prompts = list(prompts)
    firsts = {prompt.tokens[0] for prompt in prompts if prompt.tokens}
    tokens = [token for prompt in islice(prompts, length) for token in prompt.tokens if token not in excluded]
    start = next((i for i, token in enumerate(tokens) if token not in firsts), 0)
    return tuple(islice(cycle(tokens[start:] + tokens[:start]), length))


class MismatchCheck:
    """Compares the first rows that have tokens of the trainer's present weights; all ranks call it together.

    `unread_fields` returns the fields of the model's configuration that `transformers` reads and the engine's model
    does not, and the nats by which each changes log-probs.
    """

    # Rows of async and partial rollouts may also have tokens of earlier weights, which cannot be compared.

    def __init__(
        self,
        setting: MaxMismatch,
        precision: Precision,
        actor: Actor,
        prompts: PromptFeed,
        longest: int,
        sampling: Sampling,
        columns: OptionalColumns,
        unread_fields: Callable[[], Mapping[str, float]],
    ) -> None:
        self._setting, self._precision, self._actor, self._prompts = setting, precision, actor, prompts
        self._longest, self._excluded, self._columns = longest, sampling.excluded_token_ids, columns
        self._bound, self._unread_fields = largest_mismatch(setting, precision), unread_fields

    @classmethod
    def of(
        cls,
        config: Config,
        actor: Actor,
        prompts: PromptFeed,
        longest: int,
        sampling: Sampling,
        columns: OptionalColumns,
    ) -> MismatchCheck:
        """Returns the check of a job whose rows have at most `longest` tokens and the given columns."""
        rollout, process = config.rollout, ENGINES[config.rollout.engine].process
        engine = TracedEngine(process.name, rollout.python) if process else None
        fields = partial(unread_fields, config.model.path, engine, longest) if engine else dict
        precision = Precision.of(actor, config)
        return cls(rollout.max_mismatch, precision, actor, prompts, longest, sampling, columns, fields)

    def __call__(self, batch: Batch) -> None:
        """Raises UserError on all ranks where the rows of all ranks differ by more than the bound."""
        if self._compare(batch, self._actor, "first {} tokens"):
            self._bound = None  # compared once

    def probe(self, engines: EngineGroup) -> None:
        """Compares the end of a row of the largest length on each engine, before there are any samples."""
        if self._bound is None or not engines.can_generate_alone:
            return
        longest, excluded = self._longest, self._excluded
        count = min(NEW_TOKENS, longest - 1)
        greedy = Sampling(max_new_tokens=count, temperature=0.0, excluded_token_ids=excluded)
        request = Request(0, probe_tokens(self._prompts, longest - count, excluded), seed=0)
        samples = engines.generate_alone(request, greedy)
        first = sum(all_gather_json(len(samples))[: dist.get_rank()])  # rows of all ranks have different ids
        samples = [replace(sample, id=first + i) for i, sample in enumerate(samples)]
        rows = [Prompt(0, request.prompt, "", None, {})] * len(samples)
        batch = samples_to_batch(rows, samples, engines.version, self._columns)
        # Engines report greedy tokens at temperature 1.
        self._compare(batch, self._actor.at_temperature(1.0), f"last {{}} tokens of rows of {longest} tokens", True)

    def _compare(self, batch: Batch, policy: Policy, which: str, is_probe: bool = False) -> bool:
        """Returns whether there are tokens to compare; raises UserError where they differ by more than the bound."""
        bound, mask = self._bound, batch["loss_mask"] & (batch["policy_versions"] == self._actor.num_updates)
        if bound is None or not any(all_gather_json(bool(mask.any()))):
            return False
        ours, theirs = policy.forward(batch, "compute_logprobs"), batch["rollout_logprobs"]
        statistics = mismatch.statistics(ours, theirs, mask, batch.positions)
        reports = all_gather_json([statistics, _worst_sample(batch, ours, mask)])
        whole = mismatch.merge(report[0] for report in reports)
        mean = mismatch.summarize(whole)["mean_abs"]
        if not mean <= bound:  # nor is NaN
            worst = max((report[1] for report in reports if report[1]), key=lambda sample: sample["mean"])
            fields = all_gather_json(dict(self._unread_fields()) if dist.get_rank() == 0 else {})[0]
            raise UserError(self._message(mean, which.format(int(whole["tokens"])), worst, fields, is_probe))
        return True

    def _message(
        self, mean: float, which: str, worst: dict[str, Any], fields: Mapping[str, float], is_probe: bool
    ) -> str:
        remedies = ["rollout.engine=hf"] if self._precision.engine != "hf" else []
        remedies += ["rollout.wire=cast"] if self._precision.wire != "cast" else []
        remedies += ["another kv_cache_dtype"] if self._precision.cache not in WHOLE else []
        remedies += [f"rollout.{key}=true" for key in self._precision.selects_twice]
        tried = f"Try {', '.join(remedies)} as" if remedies else "Look for the cause as"
        sample = "In one of them,"
        if not is_probe:
            where = f"sample_id {worst['sample_id']} of the prompt {self._prompts.by_id(worst['prompt_id']).where}"
            sample = f"The worst sample, {where}, differs by {worst['mean']:.3g}:"
        unread = ", ".join(f"{name} (without it, a narrow copy differs by {fields[name]:.2g} nats)" for name in fields)
        unread = unread and f" Only transformers reads these fields of config.json: {unread}."
        return (
            f"rollout.max_mismatch={self._setting}: log-probs of engine and trainer differ by {mean:.3g} nats on "
            f"average over the {which}, more than {self._bound:g}. {sample} at position {worst['position']} of its "
            f"{worst['length']} tokens the engine has {worst['engine']:.7g} and the trainer {worst['trainer']:.7g}."
            f"{unread} {tried} docs/guides/debug_a_mismatch.md says, or train in spite of it with a larger "
            "rollout.max_mismatch, or null for none."
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
