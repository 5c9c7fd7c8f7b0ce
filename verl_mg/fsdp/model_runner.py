"""Model of one role on this rank, as a sharded module of `transformers`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage

from verl_mg import device
from verl_mg.batch import SELECTED_KEYS
from verl_mg.checkpoint.model_directory import ModelDirectories
from verl_mg.choice import Choice
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.distributed.collectives import all_gather_json, raised_together
from verl_mg.errors import UserError
from verl_mg.fsdp.family_check import FamilyChecks, Form, check_module, needs_proof
from verl_mg.fsdp.lora import FsdpAdapters
from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.fsdp.model import (
    ATTENTION,
    PackedModule,
    build_module,
    check_module_layout,
    fit_expert_kernels,
    generic,
    local_tensors,
    logit_scale_of,
    parameter_splits,
    recompute_layers,
    shard_over_data,
    shard_tensors,
)
from verl_mg.fsdp.output import LogitScale
from verl_mg.fsdp.packed_rows import RowsReader
from verl_mg.fsdp.routing import RoutingReplay
from verl_mg.fsdp.shard_map import ParameterSplit, fsdp_shard_map
from verl_mg.fsdp.vision import ImagePacker
from verl_mg.models.hf_config import other_choice
from verl_mg.phase_timer import PhaseTimer
from verl_mg.sharding.boxes import Box
from verl_mg.sharding.model_table import SCORE
from verl_mg.sharding.module_table import ModuleTable, module_table
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.training.logprobs import OutputHead, VocabularyShard
from verl_mg.training.microbatch import ROUTED_EXPERTS
from verl_mg.training.model_spec import ModelSpec
from verl_mg.training.packed_attention import Scores, kernel
from verl_mg.training.runner import ComputedParameters, Pass, Report, Runner
from verl_mg.training.storages import storages_here
from verl_mg.training.weights import load_directory


class FsdpRunner(Runner):
    """Model of the FSDP backend, see `Runner`.

    Trained weights are float32, of which gathered copies in `dtype` compute; frozen weights are in `dtype`.

        built on all ranks (no memory) -> tensor-parallel chunks -> shard map -> sharded, allocated -> loaded by the map

    Attributes:
        groups: process groups of the placement.
        packed: the sharded module; None outside the placement.
        summed_gradients: names of parameters whose gradients are summed over the tensor-parallel ranks.
    """

    lora: FsdpAdapters | None
    table: ModuleTable

    def __init__(
        self,
        spec: ModelSpec,
        groups: MeshGroups,
        directories: ModelDirectories | None = None,
        timer: PhaseTimer | None = None,
        families: FamilyChecks | None = None,
    ) -> None:
        super().__init__(spec, groups, timer)
        model_dir, head, lora = spec.path, spec.head, spec.lora
        self.groups = groups
        self.table = module_table(model_dir, head)
        stored_dtype = torch.float32 if spec.trained and lora is None else spec.dtype
        where = str(model_dir / "config.json")
        # Ranks outside the placement build it too, without memory: they know the shards of all others.
        self._is_proven = needs_proof(self.table)
        module = build_module(model_dir, head, stored_dtype, is_packed=not self._is_proven)
        check_module_layout(module, groups.layout, where)
        families = families or FamilyChecks()
        self.form = families.form(spec, groups) if self._is_proven else Form(is_packed=True)
        if self._is_proven and self.form.is_packed:
            module = build_module(model_dir, head, stored_dtype)
        processor = ImageProcessor.read(model_dir)
        packer = ImagePacker(module, processor) if processor else None
        replay = None
        if spec.replays_routing and self.table.config.experts:
            families.check_replay(spec, groups)
            replay = RoutingReplay(module, self.table.config.experts.layers, where)
        replayed = replay.layers if replay else ()
        self._reader = RowsReader(spec.hidden_offset, self.form.is_packed, packer, replayed)
        scale = logit_scale_of(module, head, model_dir)
        self._head = None if scale is None else output_head(module, scale, self.table)
        whole = self.table.parameter_shards()
        vision = self.table.vision_parameters
        # No gradient passes through a choice of keys: its parameters stay as they are, whatever the weight decay.
        idle = {name for name, _ in module.named_parameters() if generic(name) in self.form.idle}
        self._frozen = (vision if spec.fsdp.freeze_vision_tower else frozenset()) | (idle - vision)
        for name in self._frozen:
            module.get_parameter(name).requires_grad_(False)
        self.lora = None
        if lora:
            if groups.layout.tp > 1:
                raise UserError(f"layout {groups.layout}: no tp with lora and backend: fsdp. Leave out tp.")
            self.lora = FsdpAdapters(self.table, module, whole, lora, trains=self.is_member)
        apart = self.lora.module_parameters if self.lora else frozenset()
        self.packed: PackedModule | None = None
        self.summed_gradients: frozenset[str] = frozenset()
        if self.is_member:
            self.summed_gradients = shard_tensors(module, groups.tensor_mesh, where)
        splits = parameter_splits(module, groups.ranks.shape[1], apart)
        if groups.layout.tp > 1:  # ranks outside the placement do not know the plan
            fields = {name: (s.tensor_dim, s.parts, s.dim) for name, s in splits.items()}
            first = all_gather_json(fields if dist.get_rank() == self.placement.ranks[0] else None)
            splits = {name: ParameterSplit(*s) for name, s in first[self.placement.ranks[0]].items()}
        self._shard_map = fsdp_shard_map(whole, splits, groups.ranks, self.table.tensor_index.tensors)
        if self.is_member:
            if spec.recompute:
                recompute_layers(module, where, replay)
            fit_expert_kernels(module)
            self.packed = PackedModule(module, scale, groups.tensor_ranks, replay)
            shard_over_data(self.packed, groups, spec.fsdp, spec.dtype, apart)
        stored = self._trained_tensors() if spec.from_checkpoint else frozenset()
        self.unrestored = load_directory(self, directories, stored_dtype, stored)
        if self.lora and not spec.from_checkpoint:
            self.lora.initialize()
        self.unrestored.update(self.adapters() if spec.from_checkpoint else ())
        if self._is_proven and not spec.from_checkpoint:
            self._check_module(where)

    def _check_module(self, where: str) -> None:
        """Checks the module with its weights; UserError on all ranks where it is not right on one."""
        with raised_together(UserError):
            if self.packed is not None:
                try:
                    shard = self.groups.token_shard(self.layout.cp)
                    check_module(self.packed, self._reader, shard, self.dtype, where)
                finally:
                    self.packed.reshard()  # type: ignore[operator]

    def _kernels(self) -> Iterator[Choice]:
        assert self.packed is not None
        module: Any = self.packed.module
        text, place = module.config.get_text_config(), device.current_device()
        yield Choice("kernels", "torch, in modules of transformers")
        if self._is_proven:
            yield Choice("rows", self.form.chosen)  # the check has warned of its price
        if text._attn_implementation == ATTENTION:
            for part in module.modules():
                if hasattr(part, "layer_idx") and hasattr(part, "is_causal"):  # attention, by its names in transformers
                    window = getattr(part, "sliding_window", getattr(text, "sliding_window", None))
                    softcap, sinks = getattr(part, "attn_logit_softcapping", None), getattr(part, "sinks", None)
                    scores = Scores(window=window, softcap=softcap, sinks=sinks)
                    yield kernel(place, self.dtype, scores).choice(f"attention, {scores.kind}")
        elif not self.form.is_packed:
            yield Choice("attention", f"transformers' {text._attn_implementation}")
        else:
            slow = "its memory grows with the square of a micro-batch. Lower tokens_per_micro_batch if it is short."
            yield Choice("attention", "torch's SDPA, masks of all pairs", slow)
        if self.table.config.experts:
            kind = text._experts_implementation
            slow = (
                f"their widths are no multiples of 16 bytes. {other_choice(self.spec.path)}" if kind == "eager" else ""
            )
            yield Choice("experts", f"transformers' {kind}", slow)

    def _trained_tensors(self) -> frozenset[str]:
        tensors = self.table.tensor_index.tensors.keys()
        frozen = {piece.tensor for name in self._frozen for piece in self.table.parameter_shards()[name].pieces}
        return frozenset(tensors & {SCORE} if self.spec.lora else tensors - self.table.router_biases - frozen)

    def _run(self, work: Pass) -> list[Report]:
        if not self._reader.replayed and any(ROUTED_EXPERTS in rows for rows in work.micro_batches):
            raise UserError(
                f"column {ROUTED_EXPERTS!r}: the replay of {self.spec.path} was not checked. Set "
                "rollout.replay_routing=true, or leave the column out."
            )
        if self.table.config.indexer and any(SELECTED_KEYS in rows for rows in work.micro_batches):
            raise UserError(
                f"column {SELECTED_KEYS!r}: fsdp does not replay selections of keys. Leave the column out, or set the "
                "role's backend to megatron."
            )
        packed: Any = self.packed
        reports, place = [], device.current_device()
        prepared = [
            self._reader.micro_batch(rows, self.groups.token_shard(cp_size), place, calls)
            for rows, cp_size, calls in zip(work.micro_batches, work.cp_sizes, self._calls(work), strict=True)
        ]
        for number, micro in enumerate(prepared):
            # FSDP waits for the reductions of gradients only in the last backward pass.
            packed.set_is_last_backward(number == len(prepared) - 1)
            output = packed(micro, work.temperature, work.outputs)
            loss, report = work.loss_closure(micro, output)
            if not work.forward_only:
                loss.backward()
            reports.append(report)
        # Without a backward pass, which does it, the parameters outside of layers would stay gathered.
        if work.forward_only:
            packed.reshard()
        return reports

    def _calls(self, work: Pass) -> list[int]:
        """Returns the calls of the module in each micro-batch: all ranks gather its parameters together."""
        counts = torch.tensor([max(len(rows), 1) for rows in work.micro_batches])
        if not self._reader.is_packed:
            dist.all_reduce(counts, dist.ReduceOp.MAX, group=self.host_group)
        return counts.tolist()

    @property
    def output_head(self) -> OutputHead:
        assert self._head is not None, "a value head has no vocabulary"
        return self._head

    def vocabulary_shard(self) -> VocabularyShard | None:
        return self.packed.vocabulary_shard(self.output_head.vocab) if self.packed else None

    # -- weights

    def parameters(self, complete: bool = True) -> dict[str, Tensor]:
        """Returns this rank's parts of the parameters, see `Runner.parameters`; they are always complete."""
        if self.packed is None:
            return {}
        named, known = local_tensors(self.packed.module), self._shard_map.shards(dist.get_rank())
        return {name: shard.described(named[name]) for name, shard in known.items()}

    def wait_for(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Does not wait: parameters are always complete."""

    @property
    def computed_parameters(self) -> frozenset[str]:
        place, adapted = device.current_device(), self.lora.adapted_parameters if self.lora else frozenset()
        # GPU: with `fsdp.cpu_offload`, weights are copied to the device before they are sent.
        # GPU-TEST: tests/fsdp/test_fake_cuda.py::test_weights_in_host_memory_train_as_those_on_the_device
        # GPU-RAN: h200-1
        moved = {n for n, t in self.parameters().items() if t.device.type != place.type or self._is_cast(n, t)}
        return adapted | moved

    def served_parameters(self) -> Mapping[str, Tensor]:
        return ComputedParameters(self.parameters(), self._served)

    def _served(self, name: str, weight: Tensor) -> Tensor:
        # On the device also with `fsdp.cpu_offload`: a message never has values from two kinds of memory.
        weight = weight.to(device.current_device())
        merged = self.lora.merged(name, weight, self._rows(name)) if self.lora else weight
        return merged.to(self.dtype) if self._is_cast(name, merged) else merged

    def _is_cast(self, name: str, tensor: Tensor) -> bool:
        """Returns whether a parameter is sent in `dtype`: all but those that have their own in every runtime."""
        pieces = self._shard_map.shards(dist.get_rank())[name].pieces
        tensors = self.table.tensor_index.tensors
        return tensor.dtype is not self.dtype and not any(tensors[piece.tensor].dtype for piece in pieces)

    def _rows(self, name: str) -> slice:
        """Returns the rows of a matrix of the module that this rank has."""
        pieces = self._shard_map.shards(dist.get_rank())[name].pieces
        return slice(*pieces[0].source[0]) if pieces else slice(0, 0)

    def shard_map(self) -> ShardMap:
        return self._shard_map

    def written_adapters(self) -> Iterator[tuple[str, Box, Tensor]]:
        """Yields the adapters on the first rank of the placement: every rank has them whole."""
        if self.lora and dist.get_rank() == self.placement.ranks[0]:
            yield from self.lora.boxes()

    def trained(self) -> Mapping[str, Tensor]:
        if self.lora or self.packed is None:
            return self.adapters()
        trained = {name for name, parameter in self.packed.module.named_parameters() if parameter.requires_grad}
        return {name: tensor for name, tensor in self.parameters().items() if name in trained}

    # -- memory

    @property
    def entry_modules(self) -> Sequence[torch.nn.Module]:
        """The whole sharded module of this rank."""
        return [self.packed] if self.packed is not None else []

    def weight_storages(self) -> list[UntypedStorage]:
        if self.packed is None:
            return []
        local = local_tensors(self.packed.module)
        return storages_here([*local.values(), *self.packed.buffers(), *self.adapters().values()])

    def drop_caches(self) -> None:
        if self.packed is not None:
            self.packed.reshard()  # type: ignore[operator]


def output_head(module: Any, scale: LogitScale, table: ModuleTable) -> OutputHead:
    """Returns the output layer of a module, not yet sharded, as it is in the model directory."""
    weight = module.get_output_embeddings().weight
    shards = table.parameter_shards()
    (name,) = {n for n, p in module.named_parameters(remove_duplicate=False) if p is weight and n in shards}
    vocab, hidden = weight.shape
    return OutputHead(shards[name].pieces[0].tensor, vocab, hidden, scale.softcap, scale.scale)
