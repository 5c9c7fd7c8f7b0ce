"""The policy that is trained."""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl_mg.algorithms.aggregation import normalizer
from verl_mg.batch import Batch
from verl_mg.config import OptimizerConfig
from verl_mg.megatron.offload import HostCopy
from verl_mg.megatron.trainer import TokenLoss, Trainer
from verl_mg.reshard.owners import duties
from verl_mg.roles.exchange import index_rows
from verl_mg.roles.policy import Policy
from verl_mg.weights.boxes import slices
from verl_mg.weights.files import CheckpointWriter


class Actor(Policy):
    """A policy with an optimizer."""

    def __init__(self, *arguments: Any, optimizer: OptimizerConfig, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.trainer = Trainer(self.network, optimizer)
        self.host_copy = HostCopy(self.trainer)
        self.updates = 0

    def update(
        self,
        batch: Batch,
        loss: TokenLoss,
        aggregation: str,
        *,
        minibatches: int = 1,
        epochs: int = 1,
        max_length: int | None = None,
    ) -> dict[str, float]:
        """`epochs` passes over the batch, an optimizer step for each of its `minibatches` parts.

        `loss` is a function of the judged tokens, see `verl_mg.megatron.microbatch.LossTokens`. Parts are cut in the
        order of the sample ids, so they do not depend on the layout. Returns metrics averaged over the steps.
        """
        self.claim()
        index = index_rows(batch)
        totals: dict[str, float] = defaultdict(float)
        parts = torch.arange(len(index)).tensor_split(min(minibatches, max(len(index), 1)))
        steps = [part.tolist() for part in parts] * epochs
        for rows in steps:
            tokens = sum(index.judged[row] for row in rows)
            sequences = sum(index.judged[row] > 0 for row in rows)
            metrics = self.trainer.update(
                self.fetch(batch, index, self.share(index, rows)),
                self._temperature,
                loss,
                aggregation,
                normalizer(aggregation, tokens, sequences, max_length),
                tokens,
            )
            self.updates += 1
            for name, value in metrics.items():
                totals[f"actor/{name}"] += value / len(steps)
        return dict(totals)

    def save(self, folder: Path, model_dir: Path) -> None:
        """Write a Hugging Face directory: each rank its own boxes, the small files copied from `model_dir`.

        It is written beside `folder` and renamed when it is whole.
        """
        self.claim()
        partial = folder.with_name(folder.name + ".partial")
        writer = CheckpointWriter(partial, self.network.table.huggingface(), self.network.dtype)
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            writer.create()
            _copy_small_files(model_dir, partial)
            _tell_dtype(partial / "config.json", self.network.dtype)
        dist.barrier()
        parameters = self.network.parameters()
        for duty in duties(self.network.holdings(), dist.get_rank()):
            writer.write(duty.tensor, duty.box, parameters[duty.parameter].detach()[slices(duty.at)])
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(partial, folder)
        dist.barrier()


def _copy_small_files(source: Path, target: Path) -> None:
    """Configuration and tokenizer; the weights are ours."""
    for file in source.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.suffix not in (".bin", ".pt"):
            shutil.copy2(file, target / file.name)


def _tell_dtype(config: Path, dtype: torch.dtype) -> None:
    """The copied configuration names the type of the weights that it came with; ours may have another."""
    tree = json.loads(config.read_text(encoding="utf-8"))
    name = "torch_dtype" if "torch_dtype" in tree else "dtype"
    tree[name] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
