"""A role with an optimizer."""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl_mg.algorithms.aggregation import normalizer
from verl_mg.batch import Batch
from verl_mg.checkpoint.hf_safetensors import CheckpointWriter
from verl_mg.checkpoint.peft import AdapterWriter
from verl_mg.checkpoint.sharded_safetensors import StoredBox
from verl_mg.config import ConfigSection, Count, GuardConfig, OptimizerConfig
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.megatron.model_runner import ModelRunner
from verl_mg.megatron.offload import CpuOffload
from verl_mg.megatron.sharded_state import weights
from verl_mg.megatron.trainer import TokenLoss, Trainer, TrainerCounters
from verl_mg.reshard.write_assignment import assign_writes
from verl_mg.roles.role import Role
from verl_mg.roles.row_dispatch import RowIndex, build_row_index
from verl_mg.sharding.boxes import slices

ADAPTER_FOLDER = "adapter"
"""Of adapters in PEFT's format, in the directory of a model in which they are merged."""


@dataclass(frozen=True)
class _Step:
    """A mini-batch: this rank's micro-batches of it, and its judged tokens and sequences over all ranks.

    contexts: how many context-parallel ranks share each micro-batch.
    """

    micro_batches: list[Batch]
    cp_sizes: list[int]
    tokens: int
    sequences: int


class RoleCounters(ConfigSection):
    """The numbers of a role that learns."""

    updates: Count
    trainer: TrainerCounters


class NoOptimizerError(Exception):
    """A role without an optimizer was asked for an update: an iteration of rollouts alone ends here."""


class TrainableRole(Role):
    """A network that learns. name: of the role, before its metrics. learns: without it, it has no optimizer."""

    trainer: Trainer

    def __init__(
        self,
        *arguments: Any,
        optimizer: OptimizerConfig,
        guard: GuardConfig | None = None,
        learns: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._learns = learns
        if learns:
            self.trainer = Trainer(self.runner, optimizer, guard or GuardConfig(), self.name)
            self.cpu_offload = CpuOffload(self.runner, self.trainer.optimizer if self.runner.is_member else None)
        self.num_updates = 0
        self.trained_batches: list[Batch] = []
        """The batches of this iteration's updates."""

    def update(
        self,
        batch: Batch,
        loss: TokenLoss,
        aggregation: str,
        *,
        num_minibatches: int = 1,
        num_epochs: int = 1,
        max_length: int | None = None,
    ) -> Mapping[str, float]:
        """`num_epochs` passes over the batch, an optimizer step for each of its `num_minibatches` parts.

        `loss` is a function of the judged tokens, see `verl_mg.megatron.microbatch.LossInputs`. Parts are cut in the
        order of the sample ids, so they do not depend on the layout; rows that share their `pair` stay together, in
        one part and in one micro-batch. Returns metrics averaged over the steps.
        """
        if not self._learns:
            raise NoOptimizerError
        self.trained_batches.append(batch)
        self._context.offload.release_engines()
        with self._context.timer("rows"):
            index = build_row_index(batch)
            parts = torch.arange(len(index.units)).tensor_split(min(num_minibatches, max(len(index.units), 1)))
            steps = [self._step(batch, index, [index.units[i] for i in part.tolist()]) for part in parts] * num_epochs
        self.num_updates += len(steps)

        def work() -> dict[str, float]:
            totals: dict[str, float] = defaultdict(float)
            if self.runner.is_member:
                self._context.offload.load_exclusively(self.cpu_offload)
                for step in steps:
                    divisor = normalizer(aggregation, step.tokens, step.sequences, max_length)
                    told = self.trainer.update(
                        step.micro_batches,
                        self._temperature,
                        loss,
                        aggregation,
                        divisor,
                        step.tokens,
                        step.cp_sizes,
                    )
                    for name, value in told.items():
                        totals[f"{self.name}/{name}"] += value / len(steps)
            return dict(totals)

        def deliver(metrics: dict[str, float]) -> dict[str, float]:
            return all_gather_json(metrics)[self.runner.placement.ranks[0]]

        return self._context.executor.metrics(f"{self.name}.update", work, deliver)

    def _step(self, batch: Batch, index: RowIndex, units: Sequence[Sequence[int]]) -> _Step:
        rows = [row for unit in units for row in unit]
        shares = self.share(index, units)
        return _Step(
            self.fetch(batch, index, shares),
            shares.cp_sizes,
            tokens=sum(index.judged[row] for row in rows),
            sequences=sum(index.judged[row] > 0 for row in rows),
        )

    def parts(self) -> Iterator[StoredBox]:
        """What this rank writes of what the role has learned, to be copied as it comes, and to the end."""
        self._on_device()
        if self.runner.is_member:
            for part in self.trainer.parts():
                yield replace(part, namespace=f"{self.name}/{part.namespace}")

    def counts(self) -> RoleCounters:
        """The numbers that go with `parts`; all ranks call it together."""
        self._on_device()
        own = self.trainer.counts().model_dump(mode="json") if self.runner.is_member else None
        told = all_gather_json(own)[self.runner.placement.ranks[0]]
        return RoleCounters(updates=self.num_updates, trainer=TrainerCounters.model_validate(told))

    def _on_device(self) -> None:
        """All of it is there, the optimizer's state too."""
        self._context.executor.require_outside_block(f"a checkpoint of {self.name}")
        self._context.offload.release_engines()
        if self.runner.is_member:
            self._context.offload.load_exclusively(self.cpu_offload)

    def load(self, fill: Callable[[StoredBox], None], counts: RoleCounters) -> None:
        """Go on from what was written under any layout; `fill` brings the values of a part."""
        self.num_updates = counts.updates
        if self.runner.is_member:
            self._context.offload.load_exclusively(self.cpu_offload)

            def fill_own(part: StoredBox) -> None:
                fill(replace(part, namespace=f"{self.name}/{part.namespace}"))

            if self._learns:
                self.trainer.load(fill_own, counts.trainer)
            else:
                for part in weights(self.runner):
                    fill_own(part)

    def save(self, folder: Path, model_dir: Path) -> None:
        """Write a Hugging Face directory: each rank its own boxes, the small files copied from `model_dir`.

        Adapters are merged into it, and lie in its ADAPTER_FOLDER by themselves. It is written beside `folder` and
        renamed when it is whole.
        """
        self._context.executor.require_outside_block(f"{self.name}.save")
        self._context.offload.release_engines()
        self._context.offload.load_exclusively(self.cpu_offload, training=False)
        partial = folder.with_name(folder.name + ".partial")
        lora, dtype = self.runner.lora, self.runner.dtype
        writer = CheckpointWriter(partial, self.runner.table.huggingface(), dtype)
        beside = AdapterWriter(partial / ADAPTER_FOLDER, lora.shapes, dtype) if lora else None
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            writer.create()
            _copy_small_files(model_dir, partial)
            _describe(partial / "config.json", self.runner)
            if lora and beside:
                beside.create(lora.config, lora.adapted, self.model_dir)
        dist.barrier()
        served = self.runner.served_parameters()
        for parameter, own in groupby(
            assign_writes(self.runner.shard_map(), dist.get_rank()), lambda duty: duty.parameter
        ):
            values = served[parameter].detach()
            for duty in own:
                writer.write(duty.tensor, duty.box, values[slices(duty.at)])
        if lora and beside and self.runner.is_member:
            for tensor, box, values in lora.own(self.runner.groups.coordinates):
                beside.write(tensor, box, values)
        dist.barrier()
        if dist.get_rank() == 0:
            if beside:
                beside.finish()
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(partial, folder)
        dist.barrier()


def _copy_small_files(source: Path, target: Path) -> None:
    """Configuration and tokenizer; the weights are ours."""
    for file in source.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.suffix not in (".bin", ".pt"):
            shutil.copy2(file, target / file.name)


def _describe(config: Path, runner: ModelRunner) -> None:
    """The copied configuration is of the weights that were there before: ours may have another type or head."""
    tree = json.loads(config.read_text(encoding="utf-8"))
    name = "torch_dtype" if "torch_dtype" in tree else "dtype"
    tree[name] = str(runner.dtype).removeprefix("torch.")
    if runner.table.head == "value":
        kinds = tree.get("architectures") or []
        tree["architectures"] = [kind.replace("ForCausalLM", "ForSequenceClassification") for kind in kinds]
        tree |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    config.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
