"""Model roles: what trainable ones share, and roles by what their heads compute: policies, critics, reward models."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.batch import Batch, ColumnKind
from verl_mg.checkpoint.hf_safetensors import CheckpointWriter, UntrainedTensors
from verl_mg.checkpoint.peft import AdapterWriter
from verl_mg.checkpoint.sharded_safetensors import StoredBox
from verl_mg.config import Count
from verl_mg.distributed.collectives import all_gather_json, broadcast_bytes
from verl_mg.jsonl import StoredRecord
from verl_mg.layout.packing import MicroBatchPlan
from verl_mg.models.hf_families import UNTRAINED
from verl_mg.models.hf_tensors import copied_tensors
from verl_mg.reshard.routing import assign_writes
from verl_mg.roles.context import JobContext
from verl_mg.roles.role import Batching, Role
from verl_mg.rows.plan import RowIndex
from verl_mg.sharding.boxes import full_box, slices
from verl_mg.sharding.model_table import ModelTable
from verl_mg.training.logprobs import LOGPROBS, SQUARES, TeacherDivergence, TokenOutputs
from verl_mg.training.offload import CpuOffload
from verl_mg.training.runner import Runner
from verl_mg.training.trainer import TRAJECTORY_TOKENS, MiniBatch, Objective, TokenLoss, Trainer, TrainerCounters
from verl_mg.training.weights import WEIGHTS, restore_weights, stored_boxes, write_weights
from verl_mg.weight_sync.transfer_plan import SourceWeights, TransferPlan, plan_transfer

ADAPTER_FOLDER = "adapter"
"""Folder of adapters in PEFT's format, within the directory of a model into which they are merged."""


class RoleCounters(StoredRecord):
    """Counters of a trainable role in a checkpoint."""

    updates: Count  # optimizer steps so far
    trainer: TrainerCounters  # counters of its trainer


class NoOptimizerError(Exception):
    """Raised by an update of a role without an optimizer: the iteration of a rollout-only run ends here."""


class TrainableRole(Role):
    """Role with an optimizer: updates, checkpoints and exports; without a trainer in a rollout-only run."""

    trainer: Trainer

    def __init__(
        self, runner: Runner, batching: Batching, name: str, context: JobContext, trainer: Trainer | None
    ) -> None:
        super().__init__(runner, batching, name, context)
        self._learns = trainer is not None
        if trainer is not None:
            self.trainer = trainer
            self.cpu_offload = CpuOffload(runner, trainer if runner.is_member else None)
        self.num_updates = 0
        self.trained_batches: list[Batch] = []
        """Batches of this iteration's updates."""

    def allocate_moments(self) -> None:
        """Allocates the optimizer's moments, which the first update would do otherwise."""
        # Engines size their cache by the memory that is left when they start, so moments must be there before.
        if self._learns and self.runner.is_member:
            self.trainer.allocate_moments()

    def update(
        self,
        batch: Batch,
        loss: TokenLoss,
        loss_aggregation: str,
        *,
        num_minibatches: int = 1,
        num_epochs: int = 1,
        max_length: int | None = None,
        teacher: TeacherDivergence | None = None,
    ) -> Mapping[str, float]:
        """Trains on a batch: `num_minibatches` optimizer steps in each of `num_epochs` epochs.

        Mini-batches are cut in the order of the sample ids and therefore do not depend on the layout. The rows of a
        trajectory share a mini-batch, and rows with equal `pair` also a micro-batch. Example: 5 trajectories and
        `num_minibatches` 2 are steps of 3 and 2 trajectories; with fewer trajectories than mini-batches there are fewer
        steps.

        The metrics are means over the steps, the same on every rank. NoOptimizerError in a rollout-only run.

        Args:
            batch: rows of this rank, with the columns that the loss reads.
            loss: loss of each token of a micro-batch, and its metrics.
            loss_aggregation: mode of `algorithms/aggregation.py`.
            num_minibatches, num_epochs: optimizer steps of an epoch, and epochs.
            max_length: tokens of the longest possible response, for "seq-mean-token-sum-norm".
            teacher: divergence from teachers that is computed for the loss.
        """
        if not self._learns:
            raise NoOptimizerError
        self.trained_batches.append(batch)
        self._context.offload.release_engines()
        with self._context.timer("row_dispatch"):
            epoch = self._mini_batches(batch, num_minibatches)
        steps = epoch * num_epochs  # every epoch has the same mini-batches, so rows are transferred once
        self.num_updates += len(steps)  # on all ranks, here: it is the version of the weights in the next sync
        outputs = self._batching.with_likeliest(TokenOutputs(teacher=teacher), batch)
        objective = Objective(loss, loss_aggregation, self._batching.temperature, outputs, max_length)
        work = partial(self._take_steps, steps, objective)
        return self._context.executor.metrics(f"{self.name}.update", work, self._on_all_ranks)

    def _on_all_ranks(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns the metrics of the role's ranks on all ranks, as a recipe needs them."""
        ranks = self.runner.placement.ranks
        if len(ranks) == dist.get_world_size():  # which have them
            return metrics
        of_role: dict[str, float] = all_gather_json(metrics)[ranks[0]]
        return of_role

    def _mini_batches(self, batch: Batch, count: int) -> list[MiniBatch]:
        """Returns the mini-batches, whose rows are transferred together; all ranks call it together."""
        index = self._index(batch, batch)
        whole = index.row_groups_by_trajectory
        cuts = torch.arange(len(whole)).tensor_split(min(count, max(len(whole), 1)))
        row_groups = [[group for i in cut.tolist() for group in whole[i]] for cut in cuts]
        plans = [self.plan_micro_batches(index, groups) for groups in row_groups]
        every = self.gather_micro_batches(batch, index, plans)
        # With one row per trajectory, a row's own tokens are its trajectory's.
        if len(set(index.trajectories)) < len(index):
            self._put_trajectory_tokens(index, plans, every)
        return [
            MiniBatch(micro_batches, plan.cp_sizes, *_count_scored(index, [row for group in groups for row in group]))
            for micro_batches, plan, groups in zip(every, plans, row_groups, strict=True)
        ]

    def _take_steps(self, steps: Sequence[MiniBatch], objective: Objective) -> dict[str, float]:
        """Makes an optimizer step on each mini-batch; returns means of their metrics, none outside the placement."""
        totals: dict[str, float] = defaultdict(float)
        if self.runner.is_member:
            self._context.offload.load_exclusively(self.cpu_offload)
            for step in steps:
                for name, value in self.trainer.update(step, objective).items():
                    totals[f"{self.name}/{name}"] += value / len(steps)
        return dict(totals)

    def _put_trajectory_tokens(
        self, index: RowIndex, plans: Sequence[MicroBatchPlan], mini_batches: Sequence[Sequence[Batch]]
    ) -> None:
        """Adds TRAJECTORY_TOKENS to the micro-batches, which roles of a concurrent block may share."""
        counts = torch.tensor(index.trajectory_tokens)
        for plan, micro_batches in zip(plans, mini_batches, strict=True):
            for rows, micro in zip(self._rows_of_rank(dist.get_rank(), plan), micro_batches, strict=True):
                micro.put(TRAJECTORY_TOKENS, counts[rows], ColumnKind.SEQUENCE)

    def parts(self) -> Iterator[StoredBox]:
        """Yields this rank's shards of weights and optimizer state for a checkpoint.

        The iterator must be exhausted, and each value copied before the next is requested.
        """
        self._load_all()
        if self.runner.is_member:
            yield from map(self._named, self.trainer.stored_boxes())

    def counts(self) -> RoleCounters:
        """Returns the counters that belong to `parts`; all ranks call it together."""
        self._load_all()
        local = self.trainer.counters().model_dump(mode="json") if self.runner.is_member else None
        trainer = all_gather_json(local)[self.runner.placement.ranks[0]]
        return RoleCounters(updates=self.num_updates, trainer=TrainerCounters.model_validate(trainer))

    def _load_all(self) -> None:
        self._context.executor.require_outside_block(f"a checkpoint of {self.name}")
        self._context.offload.release_engines()
        if self.runner.is_member:
            self._context.offload.load_exclusively(self.cpu_offload)

    def load(self, fill: Callable[[StoredBox], None], counts: RoleCounters) -> None:
        """Restores the role from a checkpoint that was written under any layout; all ranks call it together.

        Args:
            fill: reads a box of the checkpoint into its tensor.
            counts: what `counts` returned for that checkpoint.
        """
        self.num_updates = counts.updates
        self._context.offload.release_engines()
        if self.runner.is_member:
            self._context.offload.load_exclusively(self.cpu_offload)

            if self._learns:
                self.trainer.load(lambda part: fill(self._named(part)), counts.trainer)
            else:
                restore_weights(self.runner, lambda part: fill(self._named(part)))
                self.cpu_offload.forget_weights()

    def save(self, folder: Path, model_dir: Path) -> None:
        """Writes a Hugging Face directory; all ranks call it together and each writes its boxes of the tensors.

        Adapters are merged and also saved in ADAPTER_FOLDER.

        Args:
            folder: directory to write.
            model_dir: directory from which configuration and tokenizer are copied.
        """
        # The directory is written under a temporary name and renamed when it is complete, over an existing one.
        self._context.executor.require_outside_block(f"{self.name}.save")
        self._context.offload.release_engines()
        self._context.offload.load_exclusively(self.cpu_offload, training=False)
        partial = folder.with_name(folder.name + ".partial")
        lora, dtype = self.runner.lora, self.runner.dtype
        table = self.runner.table
        writer = CheckpointWriter(
            partial,
            table.huggingface(),
            dtype,
            copies=copied_tensors(table.config),
            stacked=table.tensor_index.stacked,
            dtypes=table.tensor_index.dtypes,
            untrained=_untrained_tensors(model_dir, table),
        )
        adapter_writer = AdapterWriter(partial / ADAPTER_FOLDER, lora.shapes, dtype) if lora else None
        if dist.get_rank() == 0:
            # A job that was killed in a save may have left one.
            shutil.rmtree(partial, ignore_errors=True)
            writer.create()
            _copy_small_files(model_dir, partial)
            _patch_config(partial / "config.json", self.runner)
            if lora and adapter_writer:
                adapter_writer.create_adapters(lora.config, lora.adapted, self.runner.spec.path)
        dist.barrier()  # the files exist, into which each rank writes its boxes
        write_weights(self.runner, writer)
        if adapter_writer:
            for tensor, box, values in self.runner.written_adapters():
                adapter_writer.write(tensor, box, values)
        dist.barrier()  # all boxes are written
        if dist.get_rank() == 0:
            if adapter_writer:
                adapter_writer.finish()
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(partial, folder)
        dist.barrier()  # no rank returns before the directory has its name


class Policy(Role):
    """Language model that computes log-probs: a reference or a teacher; frozen unless it is an `Actor`."""

    def compute_logprobs(self, batch: Batch, squares: bool = False) -> Tensor:
        """Returns log p of every token under the loss mask, in nats: a float32 token column with 0 elsewhere.

        The distribution is softmax(logits / temperature), over the candidates of each draw where the batch has them.

        Entries of the actor have k more numbers where the batch has `sampler_top`: log-probs of its tokens.

        Args:
            batch: rows of this rank.
            squares: whether entries are (2,), a log-prob and the sum of the squared probabilities of all tokens.
        """
        outputs = self._batching.with_likeliest(SQUARES if squares else LOGPROBS, batch)
        return self.forward(batch, "compute_logprobs", outputs=outputs)

    def at_temperature(self, temperature: float) -> Policy:
        """Returns a view of this policy whose log-probs are at another temperature."""
        view = copy.copy(self)
        view._batching = replace(self._batching, temperature=temperature)
        return view


class Actor(TrainableRole, Policy):
    """Policy with an optimizer."""

    keeps_multi_token = True  # engines use it for speculative decoding, and exports keep it

    @property
    def weights(self) -> SourceWeights:
        """The present weights, as they are transferred to engines."""
        return SourceWeights(self.runner, self.num_updates, self.save)


class UnadaptedPolicy(Policy):
    """Actor without its adapters (LoRA): the policy that training began with, without further memory."""

    def __init__(self, actor: Actor, batching: Batching, name: str, context: JobContext) -> None:
        super().__init__(actor.runner, batching, name, context)
        self.cpu_offload = actor.cpu_offload  # the memory is the actor's, which decides where it is

    def _compute_outputs(
        self, plan: MicroBatchPlan, micro_batches: list[Batch], outputs: TokenOutputs
    ) -> dict[int, Tensor]:
        assert self.runner.lora is not None
        with self.runner.lora.disabled():
            return super()._compute_outputs(plan, micro_batches, outputs)


class Critic(TrainableRole):
    """Value model V(s_t): predicts the return from the state before token t."""

    head = "value"

    def compute_values(self, batch: Batch) -> Tensor:
        """Returns the value of the state before every token under the loss mask; float32, 0 elsewhere."""
        return self.forward(batch, "compute_values")


class RewardModel(Role):
    """Sequence classifier that scores a row at its last token, as `transformers` does."""

    head, hidden_offset = "value", 0

    def compute_scores(self, batch: Batch) -> Tensor:
        """Returns the score of each row, (n,) float32."""
        return self.forward(batch, "compute_scores", batch.last)


class TrainableRewardModel(TrainableRole, RewardModel):
    """Reward model with an optimizer."""


class Reference(Policy):
    """Frozen policy that starts as its model directory, and becomes the actor of a later iteration on request.

    Resetting the reference lets a policy move on where the penalty would hold it (ProRL, arXiv:2505.24864, section
    2.3). Where `is_refreshed`, the weights may differ from the model directory; checkpoints then contain them.
    """

    def __init__(self, runner: Runner, batching: Batching, name: str, context: JobContext) -> None:
        super().__init__(runner, batching, name, context)
        self.is_refreshed = False
        self._actor: Actor | None = None
        self._plan: TransferPlan | None = None

    def follow(self, actor: Actor) -> None:
        """Plans the transfer of an actor's weights; all ranks call it together. UserError if it has other tensors."""
        source, target = actor.runner.shard_map(), self.runner.shard_map()
        # The shorter of both types travels: rounding to it before or after the transfer gives the same values.
        dtype = min((actor.runner.dtype, self.runner.dtype), key=lambda dtype: dtype.itemsize)
        self._plan = plan_transfer(source, target, dtype)
        self._actor, self.is_refreshed = actor, True

    def refresh(self) -> None:
        """Copies the present weights of the actor, adapters merged into them; all ranks call it together."""
        assert self._actor is not None and self._plan is not None
        self._context.executor.require_outside_block("a refresh of the reference")
        offload, runner = self._context.offload, self._actor.runner
        offload.release_engines()
        # Both are on the device together: the transfer reads the actor and writes the reference.
        offload.load_exclusively(self._actor.cpu_offload, training=False)
        self.cpu_offload.to_device(training=False)
        with self._context.timer("weight_sync"):
            targets = self.runner.parameters()
            for values in self._plan.values(runner):
                values.send(targets)
        self._forget_former_weights()

    def parts(self) -> Iterator[StoredBox]:
        """Yields this rank's share of the weights for a checkpoint; all ranks together have each box once."""
        self._context.offload.release_engines()
        self._context.offload.load_exclusively(self.cpu_offload, training=False)
        parameters = self.runner.parameters()
        # Replicas have equal boxes: one rank is chosen for each.
        for write in assign_writes(self.runner.shard_map(), dist.get_rank()):
            values = parameters[write.parameter].detach()[slices(write.parameter_box)]
            yield self._named(StoredBox(WEIGHTS, write.tensor, write.box, values))

    def load(self, fill: Callable[[StoredBox], None]) -> None:
        """Restores the weights from a checkpoint that was written under any layout; all ranks call it together."""
        self._context.offload.release_engines()
        self._context.offload.load_exclusively(self.cpu_offload, training=False)
        shards, parameters = self.runner.shard_map().shards(dist.get_rank()), self.runner.parameters()
        for name, parameter in parameters.items():
            for part in stored_boxes(WEIGHTS, shards[name], parameter.detach(), full_box(tuple(parameter.shape))):
                fill(self._named(part))
        self._forget_former_weights()
        self.is_refreshed = True

    def _forget_former_weights(self) -> None:
        """Discards what was derived from the former weights: caches, and the host copy, which is made only once."""
        self.runner.drop_caches()
        self.cpu_offload.forget_weights()


def _count_scored(index: RowIndex, rows: Sequence[int]) -> tuple[int, int]:
    """Returns the numbers of scored tokens of some rows, and of trajectories with such tokens."""
    scored = {row: count for row in rows if (count := index.num_scored_tokens[row])}
    return sum(scored.values()), len({index.trajectories[row] for row in scored})


def _copy_small_files(source: Path, target: Path) -> None:
    """Copies configuration and tokenizer, but no weights."""
    for file in source.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.suffix not in (".bin", ".pt"):
            shutil.copy2(file, target / file.name)


def _untrained_tensors(model_dir: Path, table: ModelTable) -> UntrainedTensors | None:
    """Returns the tensors of the model directory that the runner does not have; all ranks call it together."""
    prefixes = UNTRAINED.get(table.config.architecture)
    if prefixes is None:
        return None
    untrained = None
    if dist.get_rank() == 0:  # one rank reads the headers of the directory
        index = table.tensor_index
        owned = index.tensors.keys() | {place.name for place in index.stacked.values()}
        untrained = UntrainedTensors.find(model_dir, prefixes, owned)
    packed = broadcast_bytes(untrained.packed() if untrained else b"")
    return untrained or UntrainedTensors.unpacked(model_dir, packed)


def _patch_config(config: Path, runner: Runner) -> None:
    """Patches the copied config.json: data type and architecture may differ from the source model."""
    tree = json.loads(config.read_text(encoding="utf-8"))
    tree.pop("quantization_config", None)  # the weights are written in the dtype of training
    name = "torch_dtype" if "torch_dtype" in tree else "dtype"
    tree[name] = str(runner.dtype).removeprefix("torch.")
    if isinstance(text := tree.get("text_config"), dict):  # SGLang reads the dtype of the language model
        text.pop("torch_dtype", None)
        text["dtype"] = tree[name]
    if runner.table.head == "value":
        kinds = tree.get("architectures") or []
        tree["architectures"] = [kind.replace("ForCausalLM", "ForSequenceClassification") for kind in kinds]
        # `transformers` takes the number of outputs from `id2label`.
        tree |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    config.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
