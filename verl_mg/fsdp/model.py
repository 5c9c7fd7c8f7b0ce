"""Module of `transformers` over packed rows, with its parameters sharded over ranks.

Collectives between ranks that share tokens or tensors have gradients; without a group each is the identity:

                     forward      backward
    sum_values       all-reduce   identity      outputs of ranks with different tokens, the same loss on all
    sum_gradients    identity     all-reduce    inputs that all ranks have, of which each uses a part
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from verl_mg import device
from verl_mg.config import FsdpConfig
from verl_mg.errors import UserError
from verl_mg.fsdp.mesh import MeshGroups, TensorRanks
from verl_mg.fsdp.output import LogitScale, body_of, read_logit_scale
from verl_mg.fsdp.packed_rows import NAME as ATTENTION
from verl_mg.fsdp.packed_rows import ModuleCall, PackedRows
from verl_mg.fsdp.routing import RoutingReplay
from verl_mg.fsdp.shard_map import ParameterSplit
from verl_mg.fsdp.vision import embed_and_run, marks_images, takes_features
from verl_mg.layout import Layout
from verl_mg.models.hf_config import other_choice
from verl_mg.models.transformers_module import has_images, meta_module, read_module_config, takes, text_fields
from verl_mg.sharding.model_table import Head
from verl_mg.training.logprobs import EVERYTHING, TokenOutputs, VocabularyShard
from verl_mg.training.microbatch import MicroBatch
from verl_mg.training.output_layer import OutputLayer

HEAD = "score"  # name of the value head's module
GROUPED_BYTES = 16  # divisor of the rows of matrices in torch's grouped product
PARTIAL = "replicated_with_grad_allreduce"
"""Style of `transformers`' plans for parameters whose gradient on a rank is only from its heads."""


class PackedModule(nn.Module):
    """Model that returns log-probabilities or values of packed rows; logits are never materialized whole."""

    def __init__(
        self, module: Any, logit_scale: LogitScale | None, ranks: TensorRanks, replay: RoutingReplay | None = None
    ) -> None:
        super().__init__()
        self.module, self._logit_scale, self._ranks, self._replay = module, logit_scale, ranks, replay

    def forward(self, micro: MicroBatch[PackedRows], temperature: float, outputs: TokenOutputs = EVERYTHING) -> Tensor:
        """Runs the model: (lines, n) float32 outputs or (1, n) values, the same on all cp and tp ranks."""
        hidden = torch.cat([self._hidden_states(call, micro.packed)[0] for call in micro.packed.calls])
        states = hidden[micro.hidden_index]
        if self._logit_scale is None:
            local = (states.float() @ getattr(self.module, HEAD).weight.float().T).T
        else:
            local = self._logprobs(states, micro, temperature, self._logit_scale, outputs)
        whole = local.new_zeros(len(local), len(micro.token_index)).index_copy(1, micro.local_index, local)
        # Each rank has the gradients of all n tokens and uses only the gradients of its tokens: each is counted once.
        return sum_values(whole, micro.packed.cp_group)

    def _hidden_states(self, call: ModuleCall, packed: PackedRows) -> Tensor:
        """Returns the last hidden states of a call's tokens, (1, t, h)."""
        body, options = body_of(self.module), dict(call.options)
        if options:
            options["packed"] = packed
        if takes(body, "use_cache"):
            options["use_cache"] = False
        with self._replay.of(call.experts) if self._replay else nullcontext():
            if call.images is not None:
                return embed_and_run(body, call.images, **options)
            hidden: Tensor = body(input_ids=call.input_ids, **options).last_hidden_state
            return hidden

    def _logprobs(
        self,
        states: Tensor,
        micro: MicroBatch[PackedRows],
        temperature: float,
        scale: LogitScale,
        outputs: TokenOutputs,
    ) -> Tensor:
        group = self._ranks.group
        weight = sum_gradients(self.module.get_output_embeddings().weight, group)
        # FSDP gathers the layer whole; a tensor-parallel rank multiplies a part of its rows, and gives their gradients.
        shard = self.vocabulary_shard(len(weight))
        part = weight[shard.first : shard.first + shard.rows]
        layer = OutputLayer(part, shard.first, shard.rows, group, scale.softcap, scale=scale.scale)
        states = sum_gradients(states, group)
        return outputs.compute(states, micro, layer, temperature)

    def vocabulary_shard(self, vocab: int) -> VocabularyShard:
        """Returns the part of a vocabulary whose logits this tensor-parallel rank computes."""
        rows = -(-vocab // self._ranks.count)
        first = min(self._ranks.index * rows, vocab)
        return VocabularyShard(first, min(rows, vocab - first), self._ranks.group)


def build_module(model_dir: Path, head: Head, dtype: torch.dtype, is_packed: bool = True) -> Any:
    """Builds the module of a model directory without memory for its parameters, see `module_of`."""
    return module_of(read_module_config(model_dir), model_dir, head, dtype, is_packed)


def module_of(config: Any, model_dir: Path, head: Head, dtype: torch.dtype, is_packed: bool) -> Any:
    """Builds the module of a configuration without memory for its parameters.

    With attention over packed rows, or the family's own; it computes without dropout and without random choices.
    """
    if is_packed:
        config._attn_implementation = {"text_config": ATTENTION} if has_images(config) else ATTENTION
    module: Any = meta_module(config, model_dir, dtype)
    if has_images(config) and not takes_features(body_of(module)):
        raise UserError(
            f"{model_dir / 'config.json'}: {type(module).__name__} of transformers does not take features of images "
            f"that are computed once for several rows. {other_choice(model_dir)}"
        )
    if has_images(config) and marks_images(module.base_model):
        # Tokens of an image attend to each other: by transformers' masks of all pairs of tokens.
        module.set_attn_implementation("sdpa")
    module.get_input_embeddings().padding_idx = None  # nothing is padded: every token's embedding has a gradient
    if head == "value":
        output = module.get_output_embeddings()
        for name, child in list(module.named_children()):
            if child is output:
                module._modules[name] = None
        hidden = module.config.get_text_config().hidden_size
        setattr(module, HEAD, nn.Linear(hidden, 1, bias=False, dtype=dtype, device="meta"))
    _fill_buffers(module, str(model_dir / "config.json"))
    # Two passes over the same rows are to be the same: some families drop elements, or draw experts, in training.
    return module.eval()


def recompute_layers(module: Any, where: str, replay: RoutingReplay | None = None) -> None:
    """Makes the backward pass compute each layer again, so that nothing of it is kept but its inputs."""
    contexts = {"context_fn": replay.contexts} if replay else {}
    if not (blocks := layer_blocks(module)):
        raise UserError(f"recompute: transformers names no layers of {where}. Write recompute=false.")
    for block in blocks:
        checkpoint(block, **contexts)


def logit_scale_of(module: Any, head: Head, model_dir: Path) -> LogitScale | None:
    """Returns what a module does with its logits; None with a value head."""
    return read_logit_scale(module, model_dir) if head == "language" else None


def _fill_buffers(module: Any, where: str) -> None:
    """Computes the buffers that are not in checkpoints, such as rotary frequencies, on the device."""
    place, computed = device.current_device(), {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                empty = torch.empty_like(buffer, device=place)
                # What nothing computes is found below.
                part._buffers[name] = empty.fill_(math.nan) if empty.is_floating_point() else empty
                computed[part, name] = name in part._non_persistent_buffers_set
    _compute_buffers(module, module)
    for name, part in module.named_modules():
        for of_part, buffer in part._buffers.items():
            if computed.get((part, of_part)) and buffer.is_floating_point() and buffer.isnan().any():
                raise UserError(f"{where}: nothing computes the buffer {name}.{of_part}. Use another model.")


def _compute_buffers(part: nn.Module, model: Any) -> bool:
    """Lets models of `transformers` compute the buffers of a part; returns whether it has any."""
    # The innermost model around a part knows the values of its buffers.
    model = part if isinstance(part, PreTrainedModel) else model
    within = [_compute_buffers(child, model) for child in part.children()]
    if has_any := bool(part._non_persistent_buffers_set) or any(within):
        # After its children, as in transformers: a model computes buffers of its layers too.
        model._init_weights(part)  # its parameters have no memory yet
    return has_any


def check_module_layout(module: Any, layout: Layout, where: str) -> None:
    """Checks that the parallel sizes divide a module."""
    fields = text_fields(module.config)
    if layout.tp > 1 and (numbers := [name for name, parameter in module.named_parameters() if not parameter.dim()]):
        # Whether a rank's gradient of it is whole or a part depends on where it is used.
        raise UserError(f"layout {layout}: no tp with {numbers[0]} of {where}, a single number. Leave out tp.")
    heads = fields.get("num_attention_heads") or 0  # none where all layers have a state
    if heads % (layout.tp * layout.cp):
        raise UserError(
            f"layout {layout}: tp{layout.tp} * cp{layout.cp} does not divide the {heads} attention heads of "
            f"{where}. Choose divisors."
        )
    kv_heads = fields.get("num_key_value_heads") or heads
    if kv_heads % layout.tp:
        raise UserError(
            f"layout {layout}: tp{layout.tp} does not divide the {kv_heads} key-value heads of {where}. "
            "Choose a divisor."
        )
    if layout.cp > 1 and has_images(module.config) and marks_images(module.base_model):
        raise UserError(f"layout {layout}: no cp with images that attend to themselves, of {where}. Leave out cp.")


def tensor_plan(module: Any, where: str) -> dict[str, str]:
    """Returns the plan of tensor parallelism that a module has: styles by names of its modules and parameters."""
    # Some architectures have a plan of the output layer only, which is ours.
    plan = dict(module.tp_plan or {})
    if not any(name.startswith(f"{module.base_model_prefix}.") for name in plan):
        raise UserError(f"{where}: transformers has no plan of tensor parallelism for this model. Leave out tp.")
    return plan


def shard_tensors(module: Any, mesh: DeviceMesh | None, where: str) -> frozenset[str]:
    """Divides a module among tensor-parallel ranks by its own plan.

    Returns the names of parameters whose gradients are only from this rank's heads, to be summed over the ranks.
    """
    if mesh is None:
        return frozenset()
    plan = tensor_plan(module, where)
    # The output layer is whole on every rank, which computes a part of its rows, and so is an embedding tied to it.
    output, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    tied = output is not None and output.weight is embedding.weight
    ends = [output, embedding] if tied else [output]
    names = {name for name, child in module.named_modules() if any(child is end for end in ends)}
    plan = {name: style for name, style in plan.items() if name not in names}
    summed = {name for name, style in plan.items() if style == PARTIAL} | _head_norms(plan)
    apply_tensor_parallelism(module, mesh, {n: s for n, s in plan.items() if s != PARTIAL})
    return frozenset(
        name
        for name, _ in module.named_parameters()
        if generic(name) in summed or generic(name).rpartition(".")[0] in summed
    )


def generic(name: str) -> str:
    """Returns the name of a parameter with `*` for numbers, as plans have it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _head_norms(plan: Mapping[str, str]) -> set[str]:
    """Returns the norms of queries and keys where a rank has some of the heads."""
    # Plans of several architectures, GLM-4.5 and mixtures of Qwen3-VL among them, do not mention that the gradients of
    # these norms are partial.
    attention = [
        name.rpartition(".")[0] for name, style in plan.items() if name.endswith(".q_proj") and style == "colwise"
    ]
    return {f"{name}.{norm}" for name in attention for norm in ("q_norm", "k_norm")}


def fit_expert_kernels(module: Any) -> None:
    """Makes experts use separate products where their parts do not fit torch's grouped product."""
    # It reads rows of multiples of 16 bytes, which every real size fits, and very small tests do not.
    stacked = [local_part(parameter) for parameter in module.parameters() if parameter.dim() == 3]
    if any(size * part.element_size() % GROUPED_BYTES for part in stacked for size in part.shape[1:]):
        module.set_experts_implementation("eager")


def shard_over_data(
    packed: PackedModule, groups: MeshGroups, options: FsdpConfig, dtype: torch.dtype, whole: frozenset[str]
) -> None:
    """Shards the parameters, see `is_whole`, over the data-parallel ranks, and allocates this rank's part."""
    module, place = packed.module, device.current_device()
    # GPU: weights in host memory are pinned.
    # GPU-TEST: tests/fsdp/test_fake_cuda.py::test_weights_in_host_memory_train_as_those_on_the_device
    # GPU-RAN: h200-1
    # On a CPU device the policy does the same, only the memory is not pinned.
    policy = CPUOffloadPolicy(pin_memory=place.type == "cuda") if options.cpu_offload else OffloadPolicy()
    stored = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    # Trained weights are float32, and their gathered copies have `dtype`. Gradients are summed in float32.
    mixed = stored != {dtype}
    precision = MixedPrecisionPolicy(
        param_dtype=dtype if mixed else None,
        reduce_dtype=torch.float32 if dtype is not torch.float32 else None,
        cast_forward_inputs=False,
    )
    sharding = groups.ranks.shape[1]
    kept = {parameter for name, parameter in module.named_parameters() if name in whole or is_whole(parameter)}
    shared: dict[str, Any] = {
        "mesh": groups.data_mesh,
        "mp_policy": precision,
        "offload_policy": policy,
        "shard_placement_fn": lambda parameter: Shard(dim) if (dim := shard_dim(parameter, sharding)) else None,
        "ignored_params": kept,
    }
    for block in sharded_blocks(module):
        fully_shard(block, reshard_after_forward=options.reshard_after_forward, **shared)
    # What is outside of layers stays gathered: the backward pass begins with the output layer.
    fully_shard(packed, reshard_after_forward=False, **shared)
    for child in packed.modules():
        if isinstance(child, FSDPModule):  # losses are divided by their global normalizers already
            child.set_gradient_divide_factor(1.0)
            child.set_force_sum_reduction_for_comms(True)
    where = torch.device("cpu") if options.cpu_offload else place
    # Only now, when this rank's part is known; buffers have their memory and values already.
    packed._apply(lambda tensor: torch.empty_like(tensor, device=where) if tensor.is_meta else tensor)


def is_whole(parameter: Tensor) -> bool:
    """Returns whether each data-parallel rank has the whole parameter: a number, or a table of integers."""
    # Gathered copies of what is sharded are cast to the dtype of the model.
    return not parameter.dim() or not parameter.is_floating_point()


def shard_dim(parameter: Tensor, sharding: int) -> int:
    """Returns the dimension that the sharding ranks divide: the first, or the second where the first is too short."""
    shape = tuple(parameter.shape)
    is_whole = not isinstance(parameter, DTensor)
    # A stack of few experts on many ranks: most ranks would have nothing of it.
    return int(is_whole and len(shape) > 2 and shape[0] < sharding and shape[1] % sharding == 0)


def parameter_splits(module: Any, sharding: int, whole: frozenset[str] = frozenset()) -> dict[str, ParameterSplit]:
    """Returns how each parameter and buffer is divided: after `shard_tensors`, before `shard_over_data`."""
    splits = {name: ParameterSplit() for name, _ in module.named_buffers()}
    for name, parameter in module.named_parameters():
        dim = None if name in whole or is_whole(parameter) else shard_dim(parameter, sharding)
        splits[name] = ParameterSplit.of(parameter, dim)
    return splits


def local_tensors(module: Any) -> dict[str, Tensor]:
    """Returns this rank's part of each parameter, and the persistent buffers, by name."""
    local = {name: local_part(parameter) for name, parameter in module.named_parameters()}
    persistent = module.state_dict(keep_vars=True).keys()
    return local | {name: buffer for name, buffer in module.named_buffers() if name in persistent}


def local_part(parameter: Tensor) -> Tensor:
    """Returns this rank's part of a parameter, which shares its memory."""
    local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach()


def layer_blocks(module: Any) -> list[nn.Module]:
    """Returns the layers, a vision tower's too; none is within another."""
    names, within = set(module._no_split_modules or ()), set[nn.Module]()
    blocks = []
    for child in module.modules():
        if child not in within and type(child).__name__ in names and any(True for _ in child.parameters()):
            blocks.append(child)
            within.update(child.modules())
    return blocks


def sharded_blocks(module: Any) -> Iterator[nn.Module]:
    """Yields the layers each of which is gathered by itself; all other parameters are gathered together."""
    blocks = layer_blocks(module)
    uses = Counter(parameter for block in blocks for parameter in set(block.parameters()))
    # A parameter that layers share (Zamba) has to be there for all of them.
    yield from (block for block in blocks if all(uses[parameter] == 1 for parameter in block.parameters()))


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        # A copy, for autograd may still need the values.
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_values(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sums values over the ranks of a group; each rank's gradient is that of the sum."""
    return _SumForward.apply(values, group) if group is not None else values


def sum_gradients(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns values as they are; the gradients of all ranks are summed in the backward pass."""
    return _SumBackward.apply(values, group) if group is not None else values
