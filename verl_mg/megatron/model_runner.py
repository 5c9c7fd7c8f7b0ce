"""Model of one role on this rank: construction, loading from a checkpoint, passes over packed micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, UntypedStorage

from verl_mg import device
from verl_mg.batch import Batch
from verl_mg.checkpoint.model_directory import ModelDirectories
from verl_mg.config import LoraConfig, MegatronConfig, Recompute
from verl_mg.layout import Layout
from verl_mg.megatron.balance_losses import factors
from verl_mg.megatron.lora import Adapters
from verl_mg.megatron.microbatch import make_micro_batch
from verl_mg.megatron.model import (
    ROUTER_BIAS,
    build_chunks,
    chunks_by_prefix,
    parameters_by_name,
    rotary_frequencies,
)
from verl_mg.megatron.multi_token import loss_factor
from verl_mg.megatron.parameter_gathers import ParameterGathers
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.megatron.routing import replayed_layers
from verl_mg.megatron.transformer_config import bias_update_rate, exchanges_keys, token_multiple
from verl_mg.models.hf_config import HFConfig, read_config
from verl_mg.models.hf_tensors import with_multi_token_layer
from verl_mg.phase_timer import PhaseTimer
from verl_mg.sharding.boxes import Box, Shard
from verl_mg.sharding.megatron import Kernels
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.sharding.weight_table import SCORE, Head, weight_table
from verl_mg.training.microbatch import MicroBatch
from verl_mg.training.runner import LossClosure, Report, Runner
from verl_mg.training.storages import storages
from verl_mg.training.teacher_layers import OutputHead, VocabularyShard
from verl_mg.training.token_outputs import TokenOutputs
from verl_mg.training.weight_loading import load_directory


class ModelRunner(Runner):
    """Model of the Megatron backend, see `Runner`.

    Its constructor is a collective of all ranks of the job. With `from_checkpoint` what is trained is left
    uninitialized, for a checkpoint that is restored before the first pass.

    Attributes:
        groups: process groups of the placement.
        megatron: fields of megatron-core's configurations.
        chunks: this rank's pipeline chunks.
        model_chunks: the same as megatron-core runs them, wrapped in its DDP where they are trained.
        bias_update_rate: change of routers' biases in an update of the model, see `ExpertLoads`; 0: they are frozen.
        balance_factors: factors of the losses for balance and size of routers' logits, see `BalanceLosses`.
        multi_token_factor: factor of the loss of multi-token prediction; 0: its layer is frozen, or there is none.
        gathers: gathers in flight of weights that were updated.
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
        keeps_multi_token: bool = False,
    ) -> None:
        config = read_config(model_dir)
        self.table = weight_table(with_multi_token_layer(config, model_dir) if keeps_multi_token else config, head)
        super().__init__(groups.placement, groups.host_group, groups.dynamic_cp, dtype, timer)
        self._hidden_offset = hidden_offset
        self.groups, self._kernels = groups, kernels
        self.megatron = megatron or MegatronConfig()
        check_layout(self.table.config, groups.layout, kernels, self.megatron)
        frequencies, self._attention_scaling = rotary_frequencies(model_dir, self.table.config.rotary_dim)
        self._frequencies = frequencies.to(device.current_device())
        # megatron-core's modules read their groups from module globals when they are built.
        with groups.active():
            options = (groups, dtype, recompute, kernels, self.megatron)
            self.chunks = build_chunks(self.table, *options) if self.is_member else []
        self.model_chunks: list[torch.nn.Module] = list(self.chunks)
        self.gathers = ParameterGathers()
        self.bias_update_rate = bias_update_rate(self.megatron, self.table.config)
        self.balance_factors = factors(self.megatron, self.table.config)
        self.multi_token_factor = loss_factor(self.megatron) if self.table.model.multi_token else 0.0
        stored = self._trained_tensors(lora) if from_checkpoint else frozenset()
        # What a checkpoint restores is not read from the model directory.
        self.unrestored = load_directory(self, model_dir, directories, dtype, stored)
        self.lora: Adapters | None = None
        if lora:
            chunks, expert_group = chunks_by_prefix(self.chunks), getattr(groups.collection, "expt_tp", None)
            shards = self.shard_map().shards(torch.distributed.get_rank())
            self.lora = Adapters(self.table, chunks, shards, lora, expert_group, not from_checkpoint)
        self.unrestored.update(self.adapters() if from_checkpoint else ())

    def _trained_tensors(self, lora: LoraConfig | None) -> frozenset[str]:
        """Returns the tensors of the table that are trained, which checkpoints contain; it has no adapters."""
        tensors = self.table.tensor_index.tensors.keys()
        if lora:
            return frozenset(tensors & {SCORE})
        frozen = set(self.table.indexers)
        if not self.bias_update_rate:
            frozen |= self.table.router_biases
        if not self.multi_token_factor:
            frozen |= self.table.multi_token_tensors - self.table.router_biases
        return frozenset(tensors - frozen)

    def parameters(self, complete: bool = True) -> dict[str, Tensor]:
        """Returns this rank's parameters by their names in the weight table, see `Runner.parameters`."""
        if complete:
            self.gathers.wait_for_all()
        return parameters_by_name(self.chunks)

    def adapters(self) -> Mapping[str, Tensor]:
        """Returns what is trained in place of the weights: adapters and a value head; {} without LoRA."""
        self.gathers.wait_for_all()
        return self.lora.parameters if self.lora else {}

    @property
    def computed_parameters(self) -> frozenset[str]:
        """Names of the parameters that have adapters on this rank."""
        return self.lora.adapted_parameters if self.lora else frozenset()

    def served_parameters(self) -> Mapping[str, Tensor]:
        """Returns `parameters` with their adapters merged into them, each computed on access."""
        # The sum is rounded to the dtype of the weights: in bfloat16 engines lose the smallest part of small
        # adapters.
        return self.lora.merge_into(self.parameters()) if self.lora else self.parameters()

    def shard_map(self) -> ShardMap:
        """Returns the shards of every rank, by the weight table."""
        return self.table.shard_map_megatron(self.placement, self._kernels)

    def trained(self) -> Mapping[str, Tensor]:
        """Returns the trained parameters of this rank, or the adapters that are trained instead."""
        # Biases of routers are among them where updates change them, although they have no gradient.
        if self.lora:
            return self.adapters()

        def is_trained(name: str, weight: Tensor) -> bool:
            return weight.requires_grad or (self.bias_update_rate > 0 and name.endswith(ROUTER_BIAS))

        return {name: weight for name, weight in self.parameters().items() if is_trained(name, weight)}

    def trained_shards(self) -> Mapping[str, Shard]:
        """Returns the shards of `trained`, in tensors of the checkpoint or of PEFT's file."""
        return self.lora.shards if self.lora else self.shard_map().shards(torch.distributed.get_rank())

    def written_adapters(self) -> Iterator[tuple[str, Box, Tensor]]:
        """Yields (tensor of PEFT's file, box in it, values) that this rank writes; all ranks write each box once."""
        if self.lora and self.is_member:
            yield from self.lora.local_boxes(self.groups.coordinates)

    @property
    def can_share_prefixes(self) -> bool:
        """Whether shared prefixes can be computed once."""
        # Not where a rank has two chunks of each sequence, nor where a token's next one is embedded with it: rows
        # that share a prefix differ in the token after it. A balance loss needs the row of each token.
        exchanged = self.layout.cp > 1 and exchanges_keys(self.megatron)
        return not (self.multi_token_factor or self.balance_factors[0] or self.dynamic_cp or exchanged)

    @property
    def output_head(self) -> OutputHead:
        """Output layer in the model directory, the embedding where the two are tied."""
        config = self.table.config
        return OutputHead(self.table.model.output.name, config.vocab, config.hidden, config.logit_softcap)

    def vocabulary_shard(self) -> VocabularyShard | None:
        """Returns the rows of the output layer on the last pipeline stage."""
        if not self.chunks or not self.chunks[-1].post_process:
            return None
        last = self.chunks[-1]
        return VocabularyShard(last.first_token, last.real_rows, self.groups.collection.tp)

    def wait_for(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Waits until the gathers of parameters are complete; None for all."""
        if parameters is None:
            self.gathers.wait_for_all()
        else:
            self.gathers.wait(parameters)

    @property
    def entry_modules(self) -> Sequence[torch.nn.Module]:
        """The first chunk: each chunk of an interleaved pipeline sees every micro-batch."""
        return self.chunks[:1]

    def model_tensors(self) -> Iterator[Tensor]:
        """Yields parameters and buffers of the chunks, with the values of the last update."""
        self.gathers.wait_for_all()
        for chunk in self.chunks:
            yield from chunk.parameters()
            yield from chunk.buffers()

    def weight_storages(self) -> list[UntypedStorage]:
        """Returns the storages of parameters and buffers."""
        return storages(self.model_tensors())

    def drop_caches(self) -> None:
        """Frees the copies in FP8 that Transformer Engine keeps of weights; the next pass makes new ones."""
        for chunk in self.chunks:
            for module in chunk.modules():
                getattr(module, "_fp8_workspaces", {}).clear()

    def _run(
        self,
        micro_batches: Sequence[Batch],
        temperature: float,
        loss_closure: LossClosure,
        forward_only: bool,
        cp_sizes: Sequence[int] | None,
        outputs: TokenOutputs,
    ) -> list[Report]:
        filled = [*micro_batches, *_fillers(micro_batches, self.layout)]
        cp_sizes = [*(cp_sizes or []), *[self.layout.cp] * (len(filled) - len(cp_sizes or []))]
        token_shards = [self.groups.token_shard(cp_size) for cp_size in cp_sizes]
        description = (self._frequencies, self._attention_scaling)
        stage = self.stage(self.groups.coordinates.pp)
        trains = not forward_only
        make = partial(
            make_micro_batch,
            stage=stage,
            hidden_offset=self._hidden_offset,
            replayed=replayed_layers(self.table.config, stage),
            multiple=token_multiple(self.chunks[0].config),
            zigzag=exchanges_keys(self.megatron),
            multi_token=trains and self.multi_token_factor > 0,
            balanced=trains and self.balance_factors[0] > 0,
        )
        prepared = [
            make(rows, *description, token_shard) for rows, token_shard in zip(filled, token_shards, strict=True)
        ]

        def step(iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            micro = next(iterator)
            return model(micro, temperature, outputs), partial(_without_division, loss_closure, micro)

        # The interleaved schedule reads every micro-batch once for each chunk of a stage.
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
        return list(reports)[: len(micro_batches)]  # without the fillers'


def _fillers(micro_batches: Sequence[Batch], layout: Layout) -> list[Batch]:
    """Returns empty micro-batches that make the number a multiple of the stages, as interleaved pipelines need."""
    return [micro_batches[0].select([])] * (-len(micro_batches) % layout.pp) if layout.vpp > 1 else []


def _without_division(
    loss_closure: LossClosure, micro: MicroBatch[Any], output: Tensor
) -> tuple[Tensor, Tensor, Report]:
    loss, report = loss_closure(micro, output)
    # megatron-core divides by this number of tokens where it is not 0; the loss is already normalized, see Trainer.
    return loss, torch.zeros((), dtype=torch.int, device=output.device), report


def check_layout(
    config: HFConfig, layout: Layout, kernels: Kernels = "torch", megatron: MegatronConfig | None = None
) -> None:
    """Checks that a model can be trained on a layout."""
    weight_table(config).check_layout(layout, kernels)
    if megatron is None or not exchanges_keys(megatron):
        layout.check_context(config.heads, config.linear_value_heads)
