"""A role with an optimizer."""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl_mg.algorithms.aggregation import normalizer
from verl_mg.batch import Batch
from verl_mg.config import Count, GuardConfig, OptimizerConfig, Section
from verl_mg.megatron.collectives import all_gather_json
from verl_mg.megatron.durable import weights
from verl_mg.megatron.network import Network
from verl_mg.megatron.offload import HostCopy
from verl_mg.megatron.trainer import Counts, TokenLoss, Trainer
from verl_mg.reshard.owners import duties
from verl_mg.roles.agenda import Metrics
from verl_mg.roles.exchange import RowIndex, index_rows
from verl_mg.roles.role import Role
from verl_mg.weights.adapters import AdapterWriter
from verl_mg.weights.boxes import slices
from verl_mg.weights.files import CheckpointWriter
from verl_mg.weights.parts import Part

ADAPTER_FOLDER = "adapter"
"""Of adapters in PEFT's format, in the directory of a model in which they are merged."""


@dataclass(frozen=True)
class _Step:
    """A mini-batch: this rank's micro-batches of it, and its judged tokens and sequences over all ranks.

    contexts: how many context-parallel ranks share each micro-batch.
    """

    micro_batches: list[Batch]
    contexts: list[int]
    tokens: int
    sequences: int


class LearnedCounts(Section):
    """The numbers of a role that learns."""

    updates: Count
    trainer: Counts


class NothingLearnsError(Exception):
    """A role without an optimizer was asked for an update: an iteration of rollouts alone ends here."""


class Trained(Role):
    """A network that learns. name: of the role, before its metrics. learns: without it, it has no optimizer."""

    trainer: Trainer

    def __init__(
        self,
        *arguments: Any,
        optimizer: OptimizerConfig,
        guard: GuardConfig | None = None,
        name: str = "actor",
        learns: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.name, self._learns = name, learns
        if learns:
            self.trainer = Trainer(self.network, optimizer, guard or GuardConfig(), name)
            self.host_copy = HostCopy(self.network, self.trainer.optimizer if self.network.present else None)
        self.updates = 0
        self.learnt: list[Batch] = []
        """The batches of this iteration's updates."""

    def update(
        self,
        batch: Batch,
        loss: TokenLoss,
        aggregation: str,
        *,
        minibatches: int = 1,
        epochs: int = 1,
        max_length: int | None = None,
    ) -> Metrics:
        """`epochs` passes over the batch, an optimizer step for each of its `minibatches` parts.

        `loss` is a function of the judged tokens, see `verl_mg.megatron.microbatch.LossTokens`. Parts are cut in the
        order of the sample ids, so they do not depend on the layout; rows that share their `pair` stay together, in
        one part and in one micro-batch. Returns metrics averaged over the steps.
        """
        if not self._learns:
            raise NothingLearnsError
        self.agenda.settle_for(batch)
        self.learnt.append(batch)
        self.claim()
        with self.agenda.clock("rows"):
            index = index_rows(batch)
            parts = torch.arange(len(index.units)).tensor_split(min(minibatches, max(len(index.units), 1)))
            steps = [self._step(batch, index, [index.units[i] for i in part.tolist()]) for part in parts] * epochs
        self.updates += len(steps)

        def work() -> dict[str, float]:
            totals: dict[str, float] = defaultdict(float)
            if self.network.present:
                self.residence.enter(self.host_copy)
                for step in steps:
                    divisor = normalizer(aggregation, step.tokens, step.sequences, max_length)
                    told = self.trainer.update(
                        step.micro_batches,
                        self._temperature,
                        loss,
                        aggregation,
                        divisor,
                        step.tokens,
                        step.contexts,
                    )
                    for name, value in told.items():
                        totals[f"{self.name}/{name}"] += value / len(steps)
            return dict(totals)

        return self.agenda.metrics(work, lambda told: all_gather_json(told)[self.network.placement.ranks[0]])

    def _step(self, batch: Batch, index: RowIndex, units: Sequence[Sequence[int]]) -> _Step:
        rows = [row for unit in units for row in unit]
        shares = self.share(index, units)
        return _Step(
            self.fetch(batch, index, shares),
            shares.contexts,
            tokens=sum(index.judged[row] for row in rows),
            sequences=sum(index.judged[row] > 0 for row in rows),
        )

    def parts(self) -> Iterator[Part]:
        """What this rank writes of what the role has learned, to be copied as it comes, and to the end."""
        self._on_device()
        if self.network.present:
            for part in self.trainer.parts():
                yield replace(part, plane=f"{self.name}/{part.plane}")

    def counts(self) -> LearnedCounts:
        """The numbers that go with `parts`; all ranks call it together."""
        self._on_device()
        own = self.trainer.counts().model_dump(mode="json") if self.network.present else None
        told = all_gather_json(own)[self.network.placement.ranks[0]]
        return LearnedCounts(updates=self.updates, trainer=Counts.model_validate(told))

    def _on_device(self) -> None:
        """All of it is there, the optimizer's state too."""
        self.agenda.settle()
        self.claim()
        if self.network.present:
            self.residence.enter(self.host_copy)

    def load(self, fill: Callable[[Part], None], counts: LearnedCounts) -> None:
        """Go on from what was written under any layout; `fill` brings the values of a part."""
        self.updates = counts.updates
        if self.network.present:
            self.residence.enter(self.host_copy)

            def fill_own(part: Part) -> None:
                fill(replace(part, plane=f"{self.name}/{part.plane}"))

            if self._learns:
                self.trainer.load(fill_own, counts.trainer)
            else:
                for part in weights(self.network):
                    fill_own(part)

    def save(self, folder: Path, model_dir: Path) -> None:
        """Write a Hugging Face directory: each rank its own boxes, the small files copied from `model_dir`.

        Adapters are merged into it, and lie in its ADAPTER_FOLDER by themselves. It is written beside `folder` and
        renamed when it is whole.
        """
        self.agenda.settle()
        self.claim()
        self.residence.enter(self.host_copy, training=False)
        partial = folder.with_name(folder.name + ".partial")
        lora, dtype = self.network.lora, self.network.dtype
        writer = CheckpointWriter(partial, self.network.table.huggingface(), dtype)
        beside = AdapterWriter(partial / ADAPTER_FOLDER, lora.shapes, dtype) if lora else None
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            writer.create()
            _copy_small_files(model_dir, partial)
            _describe(partial / "config.json", self.network)
            if lora and beside:
                beside.create(lora.config, lora.adapted, self.model_dir)
        dist.barrier()
        served = self.network.served_parameters()
        for parameter, own in groupby(duties(self.network.holdings(), dist.get_rank()), lambda duty: duty.parameter):
            values = served[parameter].detach()
            for duty in own:
                writer.write(duty.tensor, duty.box, values[slices(duty.at)])
        if lora and beside and self.network.present:
            for tensor, box, values in lora.own(self.network.groups.coordinates):
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


def _describe(config: Path, network: Network) -> None:
    """The copied configuration is of the weights that were there before: ours may have another type or head."""
    tree = json.loads(config.read_text(encoding="utf-8"))
    name = "torch_dtype" if "torch_dtype" in tree else "dtype"
    tree[name] = str(network.dtype).removeprefix("torch.")
    if network.table.head == "value":
        kinds = tree.get("architectures") or []
        tree["architectures"] = [kind.replace("ForCausalLM", "ForSequenceClassification") for kind in kinds]
        tree |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    config.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
