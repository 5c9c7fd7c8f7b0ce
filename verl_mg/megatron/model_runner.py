"""Model of one role on this rank: construction, loading from a checkpoint, passes over packed micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from verl_mg import device
from verl_mg.batch import Batch
from verl_mg.checkpoint.model_directory import ModelDirectories
from verl_mg.config import LoraConfig, MegatronConfig, Recompute
from verl_mg.layout import Layout, Placement, Stage
from verl_mg.megatron.lora import Adapters
from verl_mg.megatron.microbatch import MicroBatch, make_micro_batch
from verl_mg.megatron.model import build_chunks, chunks_by_prefix, parameters_by_name, rotary_frequencies
from verl_mg.megatron.parameter_gathers import ParameterGathers
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.megatron.routing import replayed_layers
from verl_mg.megatron.transformer_config import exchanges_keys, token_multiple
from verl_mg.megatron.weight_loading import load_weights
from verl_mg.models.hf_config import HFConfig, read_config
from verl_mg.phase_timer import PhaseTimer
from verl_mg.sharding.megatron import Kernels
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.sharding.weight_table import SCORE, Head, WeightTable, weight_table

T = TypeVar("T")
Report = dict[str, Tensor]
"""Values that a loss closure reports for a micro-batch."""
LossClosure = Callable[[MicroBatch, Tensor], tuple[Tensor, Report]]
"""(micro-batch, output of the last stage) -> (scalar to differentiate, report)."""

HEAD_SEED = 1
"""Seed of a value head that the checkpoint does not contain."""


class ModelRunner:
    """Model on the ranks of a placement. Methods that compute are called by all ranks of the placement at once.

    Ranks of the job outside the placement have the weight table, but no chunk and no parameter.

    Attributes:
        table: weight table of the model.
        groups: process groups of the placement.
        dtype: dtype of the weights.
        megatron: fields of megatron-core's configurations.
        chunks: this rank's pipeline chunks.
        model_chunks: the same as megatron-core runs them, wrapped in its DDP where they are trained.
        lora: adapters that are trained; None where the weights are.
        gathers: gathers in flight of weights that were updated.
        unrestored: names of this rank's parameters, adapters included, whose values a checkpoint still has to restore.
    """

    def __init__(
        self,
        model_dir: Path,
        groups: ParallelGroups,
        dtype: torch.dtype,
        recompute: Recompute = False,
        head: Head = "language",
        hidden_offset: int = 1,
        lora: LoraConfig | None = None,
        timer: PhaseTimer | None = None,
        directories: ModelDirectories | None = None,
        from_checkpoint: bool = False,
        kernels: Kernels = "torch",
        megatron: MegatronConfig | None = None,
    ) -> None:
        """Builds the model and loads its shards; a collective of all ranks of the job.

        Args:
            model_dir: Hugging Face model directory.
            groups: process groups of the placement.
            dtype: dtype of the weights.
            recompute: recompute all activations of a layer in the backward pass, or those of parts of it.
            head: output of the model: log-probabilities of a language model, or values. A value head that the
                directory does not contain is initialized small and random.
            hidden_offset: offset from a token to the hidden state that scores it, see `make_micro_batch`.
            lora: adapters to train; all other weights but a value head are frozen.
            timer: timer of the phases of this rank; None for a new one.
            directories: the model directories that the job has read; None for new ones.
            from_checkpoint: leave what is trained uninitialized, for a checkpoint restores it before the first pass.
            kernels: kernels of the layers, see `resolve_kernels`.
            megatron: fields of megatron-core's configurations; None for no others.

        Raises:
            UserError: the model cannot be read, or does not fit the layout.
        """
        self.table = weight_table(read_config(model_dir), head)
        self._hidden_offset, self.timer = hidden_offset, timer or PhaseTimer()
        self.groups, self.dtype, self._kernels = groups, dtype, kernels
        self.megatron = megatron or MegatronConfig()
        check_layout(self.table.config, groups.layout, kernels, self.megatron)
        frequencies, self._attention_scaling = rotary_frequencies(model_dir)
        self._frequencies = frequencies.to(device.current_device())
        with groups.active():
            options = (groups, dtype, recompute, kernels, self.megatron)
            self.chunks = build_chunks(self.table, *options) if self.is_member else []
        self.model_chunks: list[torch.nn.Module] = list(self.chunks)
        self.gathers = ParameterGathers()
        stored = _trained_tensors(self.table, lora) if from_checkpoint else frozenset()
        read = {name: shard for name, shard in self.table.huggingface().items() if name not in stored}
        whole, head_values = self.shard_map(), _fresh_head(self.table) if SCORE in read else {}
        directory = (directories or ModelDirectories()).open(model_dir, read, frozenset(head_values))
        load_weights(directory, whole, self.parameters(), dtype, head_values, stored)
        shards = whole.shards(torch.distributed.get_rank())
        self.lora: Adapters | None = None
        if lora:
            chunks, expert_group = chunks_by_prefix(self.chunks), getattr(groups.collection, "expt_tp", None)
            self.lora = Adapters(self.table, chunks, shards, lora, expert_group, not from_checkpoint)
        self.unrestored = {name for name, shard in shards.items() if any(p.tensor in stored for p in shard.pieces)}
        self.unrestored.update(self.adapters() if from_checkpoint else ())

    @property
    def layout(self) -> Layout:
        """Parallel sizes of the model."""
        return self.groups.layout

    @property
    def placement(self) -> Placement:
        """Layout of the model and the ranks of the job that have it."""
        return self.groups.placement

    @property
    def is_member(self) -> bool:
        """True on the ranks of the placement, which compute."""
        return self.groups.is_member

    def stage(self, pp_rank: int) -> Stage:
        """Returns the contents of a pipeline stage of the model."""
        return self.layout.stage(self.table.config.layers, pp_rank)

    def output_rank(self, worker_slot: int) -> int:
        """Returns the rank that reports the outputs of a worker slot (dp * cp + cp index): tp index 0, last stage."""
        dp, cp = divmod(worker_slot, self.layout.cp)
        return self.placement.ranks[self.layout.rank_of(cp=cp, dp=dp, pp=self.layout.pp - 1)]

    @property
    def is_output_rank(self) -> bool:
        """True on the rank that reports the outputs of its data-parallel index."""
        return self.is_output_rank_for(self.layout.cp)

    def is_output_rank_for(self, cp_size: int) -> bool:
        """Returns whether this rank reports the outputs of a micro-batch that it shares with `cp_size` cp ranks."""
        if not self.is_member:
            return False
        at = self.groups.coordinates
        return at.tp == 0 and at.pp == self.layout.pp - 1 and at.cp % cp_size == 0

    def select_outputs(self, reports: Sequence[T], cp_sizes: Sequence[int] | None = None) -> list[T | None]:
        """Selects the reports of `run` that this rank is the output rank of.

        Args:
            reports: one for each micro-batch; empty except on the last pipeline stage.
            cp_sizes: number of context-parallel ranks that share each micro-batch; None for all of them.

        Returns:
            For each report, the report itself or None.
        """
        cp_sizes = cp_sizes or [self.layout.cp] * len(reports)
        return [
            report if self.is_output_rank_for(cp_size) else None
            for report, cp_size in zip(reports, cp_sizes, strict=bool(reports))
        ]

    def parameters(self, complete: bool = True) -> dict[str, Tensor]:
        """Returns this rank's parameters by their names in the weight table; {} outside the placement.

        Args:
            complete: wait until all have the values of the last update. Otherwise the caller waits for each, see
                `gathers`.
        """
        if complete:
            self.gathers.wait_for_all()
        return parameters_by_name(self.chunks)

    def adapters(self) -> Mapping[str, Tensor]:
        """Returns what is trained in place of the weights: adapters and a value head; {} without LoRA."""
        self.gathers.wait_for_all()
        return self.lora.parameters if self.lora else {}

    @property
    def adapted_parameters(self) -> frozenset[str]:
        """Names of the parameters that have adapters on this rank."""
        return self.lora.adapted_parameters if self.lora else frozenset()

    def merged_parameters(self) -> Mapping[str, Tensor]:
        """Returns `parameters` with their adapters merged into them, each computed on access.

        The sum is rounded to the dtype of the weights: in bfloat16 engines lose the smallest part of small adapters.
        """
        return self.lora.merge_into(self.parameters()) if self.lora else self.parameters()

    def shard_map(self) -> ShardMap:
        """Returns the shards of every rank, by the weight table."""
        return self.table.shard_map_megatron(self.placement, self._kernels)

    def infer(
        self, micro_batches: Sequence[Batch], temperature: float, cp_sizes: Sequence[int] | None = None
    ) -> list[tuple[Tensor, Tensor] | None]:
        """Computes log-probs or values of the scored tokens, without gradients.

        Args:
            micro_batches: rows of each micro-batch.
            temperature: sampling temperature; 0 is greedy sampling.
            cp_sizes: number of context-parallel ranks that share each micro-batch; None for all of them.

        Returns:
            For each micro-batch that this rank is the output rank of, (n,) int64 indices in its token columns and (n,)
            float32 log-probs or values, both on the CPU; None for the others; [] on ranks without reports.
        """

        def report(micro: MicroBatch, output: Tensor) -> tuple[Tensor, Report]:
            return output.sum(), {"token_index": micro.token_index, "output": output[0]}

        with torch.no_grad():
            reports = self.run(micro_batches, temperature, report, True, cp_sizes, with_entropy=False)
        selected = self.select_outputs(reports, cp_sizes)
        # Copied only here, so that the host does not wait for each micro-batch before it starts the next.
        return [None if report is None else (report["token_index"], report["output"].cpu()) for report in selected]

    def run(
        self,
        micro_batches: Sequence[Batch],
        temperature: float,
        loss_closure: LossClosure,
        forward_only: bool,
        cp_sizes: Sequence[int] | None = None,
        with_entropy: bool = True,
    ) -> list[Report]:
        """Runs megatron-core's pipeline schedule over micro-batches; all ranks of the placement call it.

        Args:
            micro_batches: rows of each micro-batch, with the columns of this rank's stage, see `make_micro_batch`.
            temperature: sampling temperature; 0 is greedy sampling.
            loss_closure: called on the last stage with each micro-batch and its output.
            forward_only: whether to leave out the backward pass.
            cp_sizes: number of context-parallel ranks that share each micro-batch; None for all of them.
            with_entropy: compute entropies of a language model.

        Returns:
            The reports of the loss closure in order; [] except on the last stage.
        """
        if not self.is_member:
            return []
        with self.timer("forward" if forward_only else "update"):
            return self._run(micro_batches, temperature, loss_closure, forward_only, cp_sizes, with_entropy)

    def _run(
        self,
        micro_batches: Sequence[Batch],
        temperature: float,
        loss_closure: LossClosure,
        forward_only: bool,
        cp_sizes: Sequence[int] | None,
        with_entropy: bool,
    ) -> list[Report]:
        # Temperature 0 is greedy sampling, whose log-probs are those of the unscaled distribution.
        scale = temperature if temperature > 0 else 1.0
        filled = [*micro_batches, *_fillers(micro_batches, self.layout)]
        cp_sizes = [*(cp_sizes or []), *[self.layout.cp] * (len(filled) - len(cp_sizes or []))]
        token_shards = [self.groups.token_shard(cp_size) for cp_size in cp_sizes]
        description = (self._frequencies, self._attention_scaling)
        stage = self.stage(self.groups.coordinates.pp)
        replayed, multiple = replayed_layers(self.table.config, stage), token_multiple(self.chunks[0].config)
        zigzag = exchanges_keys(self.megatron)
        prepared = [
            make_micro_batch(rows, *description, token_shard, stage, self._hidden_offset, replayed, multiple, zigzag)
            for rows, token_shard in zip(filled, token_shards, strict=True)
        ]

        def step(iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            micro = next(iterator)
            return model(micro, scale, with_entropy), partial(_without_division, loss_closure, micro)

        iterators = [iter(prepared) for _ in self.model_chunks]
        with self.groups.active():
            reports = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.model_chunks,
                num_microbatches=len(prepared),
                seq_length=1,  # not read: each micro-batch has its own length
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return list(reports)[: len(micro_batches)]


def _fillers(micro_batches: Sequence[Batch], layout: Layout) -> list[Batch]:
    """Returns empty micro-batches that make the number a multiple of the stages, as interleaved pipelines need."""
    return [micro_batches[0].select([])] * (-len(micro_batches) % layout.pp) if layout.vpp > 1 else []


def _without_division(loss_closure: LossClosure, micro: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Report]:
    loss, report = loss_closure(micro, output)
    # megatron-core divides by this number of tokens where it is not 0; the loss is already normalized, see Trainer.
    return loss, torch.zeros((), dtype=torch.int, device=output.device), report


def _trained_tensors(table: WeightTable, lora: LoraConfig | None) -> frozenset[str]:
    """Returns the tensors of the table that are trained, which checkpoints contain; adapters are not in the table."""
    tensors = table.tensor_index.tensors.keys()
    return frozenset(tensors & {SCORE} if lora else tensors - table.router_biases)


def _fresh_head(weight_table: WeightTable) -> dict[str, Tensor]:
    """Draws a value head of deviation 1 / (h + 1), so that first values are near 0 (arXiv:2009.01325, appendix B)."""
    generator = torch.Generator().manual_seed(HEAD_SEED)
    return {SCORE: torch.randn(1, weight_table.config.hidden, generator=generator) / (weight_table.config.hidden + 1)}


def check_layout(
    config: HFConfig, layout: Layout, kernels: Kernels = "torch", megatron: MegatronConfig | None = None
) -> None:
    """Checks that a model can be trained on a layout.

    Args:
        config: the model.
        layout: the parallel sizes.
        kernels: kernels of the layers.
        megatron: fields of megatron-core's configurations; None for no others.

    Raises:
        UserError: a parallel size does not divide what it shards.
    """
    weight_table(config).check_layout(layout, kernels)
    if megatron is None or not exchanges_keys(megatron):
        layout.check_context(config.heads)
