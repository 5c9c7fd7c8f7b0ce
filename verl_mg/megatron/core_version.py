"""Internals of megatron-core that are used or replaced, and the differences between its two supported versions.

0.19 needs Python 3.12 or newer and is the default. 0.16.1 runs on Python 3.11, the fallback for a machine without it.

| what | why | would break where megatron-core |
|---|---|---|
| `HAVE_TE`, `te_general_gemm`, FP8 of checkpoints | 0.16.1 needs Transformer Engine for them | names them otherwise |
| `_grad_accum_fusion_available` | kernel for gradient accumulation of torch, not Apex | calls another module |
| `l2_norm_impl`, `multi_tensor_scale_impl` | the norm stays on the device, one pass to clip | clips elsewhere |
| `_set_attention_backend` | allows no unfused attention, see `model` | sets the variables elsewhere |
| `_resolve_qk_norm_config`, `_run_core_attention` | modules as in the specification | gives them other arguments |
| `parallel_state` globals, `RankGenerator` | groups of several layouts in one process | has its groups in objects |
| `_get_model_param_range_map` | a rank's range of a parameter | has a public way to it |
| functions of `use_cpu` | they need CUDA, or copy or compute by parts | calls them by other modules |

A change of a name is an error of the start, or of `tests/megatron/test_core_version.py`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import __version__ as VERSION
from megatron.core import parallel_state
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.fusions import fused_bias_geglu, fused_bias_swiglu
from megatron.core.jit import jit_fuser
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    mappings,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel import layers as linear_layers
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor, nn

from verl_mg.library import Library
from verl_mg.training import weight_gradients

Function = TypeVar("Function", bound=Callable[..., Any])

MEGATRON = Library(
    "megatron-core", VERSION, ("0.16.1", "0.19."), "Install megatron-core 0.19 with Python 3.12 or newer, or 0.16.1."
)
MEGATRON.check()

# Without Transformer Engine 0.16.1 calls isinstance with mock objects, and routers read an undefined name.
MEGATRON.replace(multi_latent_attention, HAVE_TE=isinstance(multi_latent_attention.TELinear, type))
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)

# Checkpoints that discard their output ask Transformer Engine about FP8 also where it is not installed.
if not megatron_random.HAVE_TE:
    # No forward pass is in FP8 without Transformer Engine, so the answers are constants.
    names: Any = megatron_random
    names.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    names.activation_recompute_forward = names.fp8_autocast = lambda **_: nullcontext()

# GPU: with Apex its kernel adds weight gradients to their buffers: `layers._grad_accum_fusion_available` is
# megatron-core's.
# GPU-TEST: tests/megatron/test_core_version.py::test_replaced_functions_are_those_that_megatron_core_calls
# GPU-RAN: not yet
# Linear layers call Apex's kernel for gradient accumulation where it is installed, otherwise torch's product.
if not linear_layers._grad_accum_fusion_available:
    linear_layers.fused_weight_gradient_mlp_cuda = weight_gradients
    MEGATRON.replace(linear_layers, _grad_accum_fusion_available=True)


def gradient_kernel(module: nn.Module) -> str:
    """Returns how the weight gradient of a linear layer is computed; "" for other modules."""
    if (fused := getattr(module, "fuse_wgrad_accumulation", None)) is not None:
        return "added to their buffers by Transformer Engine" if fused else "Transformer Engine's, then added"
    if (fused := getattr(module, "gradient_accumulation_fusion", None)) is None:
        return ""
    by_torch = getattr(linear_layers, "fused_weight_gradient_mlp_cuda", None) is weight_gradients
    return f"added to their buffers by {'torch' if by_torch else 'Apex'}" if fused else "torch's, then added"


def _norm_on_device(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """Returns the norm of all tensors together (1,) and no norm of each, as Apex's `multi_tensor_l2norm`."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensor_lists[0]))).view(1), None


def _scale_in_place(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float) -> None:
    """Scales tensors as Apex's `multi_tensor_scale`, where sources and targets are the same."""
    torch._foreach_mul_(tensor_lists[1], scale)


# GPU: with Transformer Engine its kernels compute the gradient norm and clip: `clip_grads.l2_norm_impl` and
# `clip_grads.multi_tensor_scale_impl` are megatron-core's.
# GPU-TEST: tests/megatron/test_core_version.py::test_replaced_functions_are_those_that_megatron_core_calls
# GPU-RAN: h200-1, h100-1
# Without Transformer Engine and Apex megatron-core reads the norm of each gradient on the host, and clips copies.
if clip_grads.l2_norm_impl is getattr(clip_grads, "local_multi_tensor_l2_norm", None):
    MEGATRON.replace(clip_grads, l2_norm_impl=_norm_on_device, multi_tensor_scale_impl=_scale_in_place)


def activated(gate: Tensor, gelu: bool) -> Tensor:
    """Computes the activation of a gated layer: SiLU, or GELU by its approximation with tanh."""
    return F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)


def activation_gradient(grad: Tensor, gate: Tensor, gelu: bool) -> Tensor:
    """Returns the gradient of the argument of `activated`."""
    if gelu:
        return torch.ops.aten.gelu_backward(grad, gate, approximate="tanh")
    return torch.ops.aten.silu_backward(grad, gate)


def _gated(x: Tensor, gelu: bool) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return activated(gate, gelu).mul_(up)


def _gated_back(grad: Tensor, x: Tensor, gelu: bool) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.cat([activation_gradient(grad * up, gate, gelu), activated(gate, gelu).mul_(grad)], dim=-1)


def fused(function: Function) -> Function:
    """Compiles elementwise operations on tokens into one kernel on a GPU, as megatron-core does."""
    # GPU: elementwise functions are compiled into one kernel, once for all numbers of tokens.
    # GPU-TEST: tests/megatron/test_fake_cuda.py::
    # test_compiled_functions_equal_themselves_and_are_compiled_once_for_all_sizes
    # GPU-RAN: h200-1
    compile_function: Any = jit_fuser
    return for_all_sizes(compile_function(function)) if torch.cuda.is_available() else function


def for_all_sizes(compiled: Any) -> Any:
    """Has a compiled function take the number of tokens, of its first argument, for a variable in the first call."""

    @functools.wraps(compiled)
    def called(*arguments: Any) -> Any:
        # torch would compile for the first number, and again for all others when it sees a second one.
        for each in arguments:
            if isinstance(each, Tensor) and each.dim() and len(each) == len(arguments[0]):
                torch._dynamo.maybe_mark_dynamic(each, 0)
        return compiled(*arguments)

    return called


def submodules(spec: Any) -> Any:
    """Returns the submodules of a module's specification: a `ModuleSpec`, in 0.19 also a `functools.partial`."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def sharded_linear_weights(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """Yields the tensor-parallel modules with their weights, which are marked as shards."""
    # 0.16.1 marks weights only when it initializes them, which is left out because every weight is loaded from a
    # checkpoint; 0.19 always marks them. Its gradient norm counts unmarked ones only on tensor-parallel rank 0.
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or not isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            continue
        if not hasattr(weight, "tensor_model_parallel"):
            dimension = 1 if isinstance(module, RowParallelLinear) else 0
            stride = 2 if name.endswith("linear_fc1") else 1  # a shard is its part of gate, then its part of up
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dimension, stride=stride)
        yield module, weight


class MLASelfAttention(multi_latent_attention.MLASelfAttention):
    """megatron-core's latent attention, which builds and calls its modules as the specification has them."""

    # 0.16.1 does so by itself and calls neither method.

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Returns the modules of the specification: 0.19 would select Transformer Engine's norms fused into linears."""
        built = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in built}

    def _run_core_attention(self, *arguments: Any, **options: Any) -> Tensor:
        """Calls core attention with its arguments unchanged: 0.19 would pad values to the width of queries."""
        return self.core_attention(*arguments, **options)


def group_globals() -> dict[str, Any]:
    """Returns the globals in which megatron-core keeps its process groups, and what it derives from them."""
    every = vars(parallel_state)
    return {name: every[name] for name in _group_names()}


@functools.cache
def _group_names() -> tuple[str, ...]:
    # Its list of all groups is replaced too: it would keep the groups of every layout, and their threads, alive.
    names = (name for name in vars(parallel_state) if name.startswith("_") and name.isupper())
    return (*names, "_global_process_group_list")


def set_group_globals(values: dict[str, Any]) -> None:
    """Sets the globals that `group_globals` has returned."""
    vars(parallel_state).update(values)


def ranks_in_groups(ranks: Sequence[int]) -> AbstractContextManager[None]:
    """Context manager: megatron-core forms groups of these ranks of the job, by their indices in the layout."""

    class Generator(parallel_state.RankGenerator):
        def get_ranks(self, token: str) -> list[list[int]]:
            return [[ranks[index] for index in group] for group in super().get_ranks(token)]

    return MEGATRON.replaced(parallel_state, RankGenerator=Generator)


def optimizer_parts(optimizer: Any) -> list[Any]:
    """Returns the optimizers of one kind of weights inside an optimizer."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def main_shard(optimizer: Any, parameter: Tensor) -> tuple[Tensor, int] | None:
    """Returns this rank's flat shard of a parameter in the optimizer's precision, and its start in the parameter."""
    # megatron-core has no public way from a parameter of the model to the range of it that a rank optimizes.
    if parameter not in optimizer.model_param_gbuf_map:
        return None
    group, position = optimizer.model_param_group_index_map[parameter]
    start: int = optimizer._get_model_param_range_map(parameter)["param"].start
    return optimizer.optimizer.param_groups[group]["params"][position], start


def use_cpu() -> None:
    """Replaces the functions of megatron-core that need CUDA, or copy over gloo without need."""
    # GPU: generators of the device: `random._get_cuda_rng_state`, `random._set_cuda_rng_state`,
    # `random._get_share_storage`.
    # GPU-TEST: tests/megatron/test_recompute.py, tests/megatron/test_core_version.py
    # GPU-RAN: h200-1, h100-1
    MEGATRON.replace(
        megatron_random,
        _get_cuda_rng_state=lambda *_, **__: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
    )
    megatron_random._get_share_storage = lambda: _copy_storage  # the original, of 0.19, compiles a function of C++
    # It warns when the CPU generator advances inside a CUDA region; here they are the same generator.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)
    # GPU: split sizes leave the device, `token_dispatcher.maybe_move_tensor_to_cpu`; NCCL gathers parts of different
    # sizes, `mappings._gather_along_first_dim`, and copies nothing in a group of one rank,
    # `param_and_grad_buffer.dist_reduce_scatter_func`, `param_and_grad_buffer.dist_all_gather_func`. Gated activations,
    # `fused_bias_swiglu.swiglu`, `fused_bias_geglu.geglu` and their gradients, are compiled.
    # GPU-TEST: tests/megatron/test_fake_cuda.py::test_train_layout_on_cuda_runs_on_every_rank,
    # tests/megatron/test_fake_cuda.py::test_train_experts_on_cuda_runs_on_every_rank
    # GPU-RAN: h200-1
    # Its formulas are for a compiler that makes one kernel of each: as they are written they pass over memory 12 times.
    for module, name, gelu in ((fused_bias_swiglu, "swiglu", False), (fused_bias_geglu, "geglu", True)):
        forward, backward = (functools.partial(function, gelu=gelu) for function in (_gated, _gated_back))
        MEGATRON.replace(module, **{name: forward, f"{name}_back": backward})
    MEGATRON.replace(token_dispatcher, maybe_move_tensor_to_cpu=_maybe_as_numpy)
    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        MEGATRON.replace(param_and_grad_buffer, **{name: _unless_alone(getattr(param_and_grad_buffer, name))})
    gather = _with_uneven_sizes(mappings._gather_along_first_dim)
    MEGATRON.replace(mappings, _gather_along_first_dim=gather)


def _unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves out collectives of one rank whose result is in its place already: gloo would copy it there and back."""

    @functools.wraps(collective)
    def called(output: torch.Tensor, values: torch.Tensor, *, group: Any, async_op: bool, **options: Any) -> Any:
        if group.size() == 1 and output.data_ptr() == values.data_ptr() and not async_op:
            return None
        return collective(output, values, group=group, async_op=async_op, **options)

    return called


def _copy_storage(target: torch.Tensor, source: torch.Tensor) -> None:
    """Allocates the storage of a tensor again, with the values of another tensor."""
    storage, values = target.untyped_storage(), source.untyped_storage()
    storage.resize_(values.nbytes())
    storage.copy_(values)


def _maybe_as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Converts split sizes to numpy, as gloo needs: megatron-core converts only tensors that it moves to the CPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _with_uneven_sizes(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Gathers parts of different sizes by all-to-all, because gloo's all-gather needs equal sizes."""

    @functools.wraps(gather)
    def gathered(part: torch.Tensor, group: Any, sizes: list[int] | None = None, *buffer: bool) -> torch.Tensor:
        if sizes is None or len(sizes) == 1:
            return gather(part, group, sizes, *buffer)
        result = part.new_empty(sum(sizes), *part.shape[1:])
        dist.all_to_all_single(result, torch.cat([part] * len(sizes)), sizes, [len(part)] * len(sizes), group=group)
        return result

    return gathered
