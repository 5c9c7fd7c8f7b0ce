"""Model of one role on this rank: construction, loading from a checkpoint, passes over packed micro-batches.

`ParameterGathers` are all-gathers of updated weights that run while their rank already computes with other weights, or
sends them. Each data-parallel rank updates its part of every bucket of weights. After the step all buckets are
gathered, in the order of the layers; whoever reads a weight waits for its bucket only:

    optimizer step   [embedding, layers 0 to 3]   [layers 4 to 7]   ...    gathers, one after the other
                     forward pass of layer 0 waits for the first bucket, that of layer 4 for the second
                     weight sync                      waits for the bucket of the weight that it sends next

On GPUs the stream that calls `wait` waits, not the host. megatron-core would start each gather in the forward pass of
the layer before; weight sync, offload and checkpoints read weights too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, UntypedStorage
from torch.nn import Module

from verl_mg import device
from verl_mg.batch import Batch
from verl_mg.checkpoint.model_directory import ModelDirectories
from verl_mg.choice import Choice
from verl_mg.device import copy_to
from verl_mg.layout import Layout
from verl_mg.megatron.balance_losses import RowsOfTokens, factors
from verl_mg.megatron.core_version import gradient_kernel
from verl_mg.megatron.lora import MegatronAdapters
from verl_mg.megatron.model import (
    ROUTER_BIAS,
    build_chunks,
    chunks_by_prefix,
    parameters_by_name,
    rotary_frequencies,
)
from verl_mg.megatron.multi_token import loss_factor, next_tokens
from verl_mg.megatron.packed_sequences import PackedSequences, describe_sequences
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.megatron.transformer_config import bias_update_rate, chosen_kernels, exchanges_keys, token_multiple
from verl_mg.models.hf_config import HFConfig, read_config
from verl_mg.models.hf_tensors import with_multi_token_layer
from verl_mg.phase_timer import PhaseTimer
from verl_mg.sharding.boxes import Box
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.sharding.weight_table import SCORE, WeightTable, weight_table
from verl_mg.training.logprobs import OutputHead, VocabularyShard
from verl_mg.training.microbatch import SHARED_TOKENS, SHARED_WITH, MicroBatch, SharedTokens, pack_rows, token_order
from verl_mg.training.model_spec import ModelSpec
from verl_mg.training.routed_experts import replayed_layers, routed_experts
from verl_mg.training.runner import Pass, Report, Runner
from verl_mg.training.selected_keys import PrescribedKeys, selecting_layers
from verl_mg.training.storages import storages
from verl_mg.training.weights import load_directory


class ParameterGathers:
    """Gathers in flight of a trained model on this rank; none without megatron-core's `overlap_param_gather`."""

    def __init__(self, models: Sequence[Any] = ()) -> None:
        self._in_flight: dict[Any, None] = {}
        # Buckets are in the order of the backward pass.
        self._groups = [
            group
            for model in models
            for group in (*reversed(model.bucket_groups), *reversed(model.expert_parallel_bucket_groups))
        ]
        self._group_of = {weight: group for group in self._groups for weight in group.params}
        for model in models:
            # Its hooks miss weights that are read outside of their modules: of adapters and of the output layer.
            model.disable_forward_pre_hook(param_sync=False)
            self._watch(model.module)

    def start(self) -> None:
        """Starts the gathers of all buckets; all data-parallel ranks call it after each optimizer step."""
        for group in self._groups:
            group.start_param_sync()
            self._in_flight[group] = None

    def wait(self, weights: Iterable[Tensor] | None = None) -> None:
        """Waits until weights are complete, None: all; weights that are not trained always are."""
        if not self._in_flight:
            return
        groups: Iterable[Any] = tuple(self._in_flight) if weights is None else map(self._group_of.get, weights)
        for group in groups:
            if group in self._in_flight:
                # All buckets are dispatched already; megatron-core would start the next one here.
                group.finish_param_sync(skip_next_bucket_dispatch=True)
                del self._in_flight[group]

    def _watch(self, chunk: Any) -> None:
        def before(module: Module, _: Any) -> None:
            self.wait(module.parameters())

        def after(decoder: Module, *_: Any) -> None:
            self.wait(chunk.parameters())  # the output layer's, which is read as a tensor, not by its module

        ends = (getattr(chunk, "embedding", None), chunk.decoder.final_layernorm, getattr(chunk, "multi_token", None))
        for module in (*ends, *chunk.decoder.layers):
            if module is not None:
                module.register_forward_pre_hook(before)
        chunk.decoder.register_forward_hook(after)


class MegatronRunner(Runner):
    """Model of the Megatron backend, see `Runner`.

    Attributes:
        groups: process groups of the placement.
        chunks: this rank's pipeline chunks.
        model_chunks: the same as megatron-core runs them, wrapped in its DDP where they are trained.
        bias_update_rate: change of routers' biases in an update of the model, see `ExpertLoads`; 0: they are frozen.
        balance_factors: factors of the losses for balance and size of routers' logits, see `BalanceLosses`.
        multi_token_factor: factor of the loss of multi-token prediction; 0: its layer is frozen, or there is none.
        gathers: gathers in flight of weights that were updated.
    """

    lora: MegatronAdapters | None = None
    table: WeightTable

    def __init__(
        self,
        spec: ModelSpec,
        groups: ParallelGroups,
        directories: ModelDirectories | None = None,
        timer: PhaseTimer | None = None,
    ) -> None:
        config = read_config(spec.path)
        config = with_multi_token_layer(config, spec.path) if spec.keeps_multi_token else config
        self.table = weight_table(config, spec.head)
        super().__init__(spec, groups, timer)
        self.groups = groups
        check_layout(config, groups.layout, spec)
        frequencies, self._attention_scaling = rotary_frequencies(spec.path, config.rotary_dim)
        self._frequencies = frequencies.to(device.current_device())
        # megatron-core's modules read their groups from module globals when they are built.
        with groups.active():
            self.chunks = build_chunks(self.table, groups, spec) if self.is_member else []
        self._parameters = parameters_by_name(self.chunks)
        self.model_chunks: list[torch.nn.Module] = list(self.chunks)
        self.gathers = ParameterGathers()
        self.bias_update_rate = bias_update_rate(spec.megatron, config)
        self.balance_factors = factors(spec.megatron, config)
        self.multi_token_factor = loss_factor(spec.megatron) if self.table.model.multi_token else 0.0
        # What a checkpoint restores is not read from the model directory.
        stored = self._trained_tensors() if spec.from_checkpoint else frozenset()
        self.unrestored = load_directory(self, directories, spec.dtype, stored)
        if spec.lora:
            chunks, expert_group = chunks_by_prefix(self.chunks), getattr(groups.collection, "expt_tp", None)
            shards = self.shard_map().shards(torch.distributed.get_rank())
            self.lora = MegatronAdapters(self.table, chunks, shards, spec.lora, expert_group)
            if not spec.from_checkpoint:
                self.lora.initialize()
        self.unrestored.update(self.adapters() if spec.from_checkpoint else ())

    def _kernels(self) -> Iterator[Choice]:
        yield chosen_kernels(self.table.config, self.spec)
        modules = [module for chunk in self.chunks for module in chunk.modules()]
        yield from (module.chosen() for module in modules if hasattr(module, "chosen"))
        if self.spec.trained and not self.spec.lora:
            yield Choice("weight gradients", ", ".join(sorted(set(map(gradient_kernel, modules)) - {""})))

    def _trained_tensors(self) -> frozenset[str]:
        """Returns the tensors of the table that are trained, which checkpoints contain; it has no adapters."""
        tensors = self.table.tensor_index.tensors.keys()
        if self.spec.lora:
            return frozenset(tensors & {SCORE})
        frozen = set(self.table.indexers)
        if not self.bias_update_rate:
            frozen |= self.table.router_biases
        if not self.multi_token_factor:
            frozen |= self.table.multi_token_tensors - self.table.router_biases
        return frozenset(tensors - frozen)

    def parameters(self, complete: bool = True) -> dict[str, Tensor]:
        if complete:
            self.gathers.wait()
        return self._parameters

    @property
    def computed_parameters(self) -> frozenset[str]:
        return self.lora.adapted_parameters if self.lora else frozenset()

    def served_parameters(self) -> Mapping[str, Tensor]:
        # The sum is rounded to the dtype of the weights: in bfloat16 engines lose the smallest part of small
        # adapters.
        return self.lora.merge_into(self.parameters()) if self.lora else self.parameters()

    def shard_map(self) -> ShardMap:
        return self.table.shard_map_megatron(self.placement, self.spec.kernels)

    def trained(self) -> Mapping[str, Tensor]:
        # Biases of routers are among them where updates change them, although they have no gradient.
        if self.lora:
            return self.adapters()

        def is_trained(name: str, weight: Tensor) -> bool:
            return weight.requires_grad or (self.bias_update_rate > 0 and name.endswith(ROUTER_BIAS))

        return {name: weight for name, weight in self.parameters().items() if is_trained(name, weight)}

    def written_adapters(self) -> Iterator[tuple[str, Box, Tensor]]:
        if self.lora and self.is_member:
            yield from self.lora.local_boxes(self.groups.coordinates)

    @property
    def can_share_prefixes(self) -> bool:
        # Not where a rank has two chunks of each sequence, nor where a token's next one is embedded with it: rows
        # that share a prefix differ in the token after it. A balance loss needs the row of each token.
        exchanged = self.layout.cp > 1 and exchanges_keys(self.spec.megatron)
        return not (self.multi_token_factor or self.balance_factors[0] or self.dynamic_cp or exchanged)

    @property
    def output_head(self) -> OutputHead:
        config = self.table.config
        return OutputHead(self.table.model.output.name, config.vocab, config.hidden, config.logit_softcap)

    def vocabulary_shard(self) -> VocabularyShard | None:
        if not self.chunks or not self.chunks[-1].post_process:
            return None
        last = self.chunks[-1]
        return VocabularyShard(last.first_token, last.real_rows, self.groups.collection.tp)

    def wait_for(self, parameters: Iterable[Tensor] | None = None) -> None:
        self.gathers.wait(parameters)

    @property
    def entry_modules(self) -> Sequence[torch.nn.Module]:
        """The first chunk: each chunk of an interleaved pipeline sees every micro-batch."""
        return self.chunks[:1]

    def model_tensors(self) -> Iterator[Tensor]:
        """Yields parameters and buffers of the chunks, with the values of the last update."""
        self.gathers.wait()
        for chunk in self.chunks:
            yield from chunk.parameters()
            yield from chunk.buffers()

    def weight_storages(self) -> list[UntypedStorage]:
        return storages(self.model_tensors())

    def drop_caches(self) -> None:
        """Frees the copies in FP8 that Transformer Engine keeps of weights; the next pass makes new ones."""
        for chunk in self.chunks:
            for module in chunk.modules():
                getattr(module, "_fp8_workspaces", {}).clear()

    def pack(self, rows: Batch, cp_size: int, trains: bool) -> MicroBatch[PackedSequences]:
        """Packs rows into a micro-batch that this rank shares with `cp_size` context-parallel ranks in all.

        Each stage reads the columns `routed_experts`, `selected_keys`, `shared_with` and `shared_tokens` if they are
        there, for others see `pack_rows`.
        """
        place, shard = self._frequencies.device, self.groups.token_shard(cp_size)
        stage = self.stage(self.groups.coordinates.pp)
        shared = SharedTokens(rows[SHARED_WITH], rows[SHARED_TOKENS]) if SHARED_TOKENS in rows and len(rows) else None
        zigzag = exchanges_keys(self.spec.megatron)
        order = token_order(rows.lengths, shard, token_multiple(self.chunks[0].config), zigzag, shared)
        packed = describe_sequences(
            order.lengths, self._frequencies, self._attention_scaling, order.key_lengths, order.keys
        )
        if order.zigzag:
            packed.keep(copy_to(place, order.local))
        packed.experts = routed_experts(rows, order, shard, replayed_layers(self.table.config, stage), place)
        if layers := selecting_layers(self.table.config, stage):
            packed.prescribed_keys = PrescribedKeys.of(rows, order, shard, layers, place)
        # Routers see the tokens of one tensor-parallel rank.
        occurrences = order.occurrences[order.local].chunk(shard.tp)[shard.tp_index]
        packed.occurrences = copy_to(place, occurrences)
        packed.cp_group = shard.group
        if trains and self.balance_factors[0]:
            row_of = torch.full((order.total,), len(rows))
            row_of[order.places] = rows.sequence_ids
            # Padding counts as a row of infinite length, so its share in every mean is 0.
            lengths = torch.cat([rows.lengths.float(), torch.tensor([torch.inf])])
            of_rank = row_of[order.local].chunk(shard.tp)[shard.tp_index]
            packed.rows_of_tokens = RowsOfTokens(copy_to(place, of_rank), copy_to(place, lengths))
        if trains and self.multi_token_factor and stage.is_last:
            packed.next_tokens = next_tokens(rows, order, place)
        return pack_rows(rows, order, packed, stage, self.spec.hidden_offset, place)

    def _run(self, work: Pass) -> list[Report]:
        # Empty micro-batches make the number a multiple of the stages, as interleaved pipelines need it.
        missing = -len(work.micro_batches) % self.layout.pp if self.layout.vpp > 1 else 0
        fillers = [work.micro_batches[0].select([])] * missing
        cp_sizes = [*work.cp_sizes, *[self.layout.cp] * len(fillers)]
        filled = zip([*work.micro_batches, *fillers], cp_sizes, strict=True)
        prepared = [self.pack(rows, cp_size, trains=not work.forward_only) for rows, cp_size in filled]

        def step(iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            micro = next(iterator)

            def loss(output: Tensor) -> tuple[Tensor, Tensor, Report]:
                loss, report = work.loss_closure(micro, output)
                # megatron-core divides by this number of tokens where it is not 0; the loss is already normalized.
                return loss, torch.zeros((), dtype=torch.int, device=output.device), report

            return model(micro, work.temperature, work.outputs), loss

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
                forward_only=work.forward_only,
            )
        return list(reports)[: len(work.micro_batches)]  # without the fillers'


def check_layout(config: HFConfig, layout: Layout, spec: ModelSpec) -> None:
    """Checks that a model can be trained on a layout."""
    weight_table(config).check_training(layout, spec.kernels, not exchanges_keys(spec.megatron))
