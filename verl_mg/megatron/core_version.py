"""Differences between the two supported versions of megatron-core; all other modules are common to both.

0.19 needs Python 3.12 or newer and is the default. 0.16.1 runs on Python 3.11, the fallback for a machine without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from megatron.core import __version__ as VERSION
from megatron.core.jit import jit_fuser
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel import layers as linear_layers
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from torch import Tensor, nn

from verl_mg.errors import UserError
from verl_mg.training import weight_gradients

Function = TypeVar("Function", bound=Callable[..., Any])

SUPPORTED = ("0.16.1", "0.19.")  # beginnings of the versions with which the project is tested

if not VERSION.startswith(SUPPORTED):
    raise UserError(
        f"megatron-core {VERSION}: not supported. Install megatron-core 0.19 with Python 3.12 or newer, or 0.16.1."
    )

# Without Transformer Engine 0.16.1 calls isinstance with mock objects, and routers read an undefined name.
multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)

# Checkpoints that discard their output ask Transformer Engine about FP8 also where it is not installed.
if not megatron_random.HAVE_TE:
    # No forward pass is in FP8 without Transformer Engine, so the answers are constants.
    names: Any = megatron_random
    names.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    names.activation_recompute_forward = names.fp8_autocast = lambda **_: nullcontext()

# Linear layers call Apex's kernel for gradient accumulation where it is installed, otherwise torch's product.
if not linear_layers._grad_accum_fusion_available:
    linear_layers.fused_weight_gradient_mlp_cuda = weight_gradients
    linear_layers._grad_accum_fusion_available = True


def _norm_on_device(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """Returns the norm of all tensors together (1,) and no norm of each, as Apex's `multi_tensor_l2norm`."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensor_lists[0]))).view(1), None


# Without Transformer Engine and Apex megatron-core reads the norm of each gradient on the host.
if clip_grads.l2_norm_impl is getattr(clip_grads, "local_multi_tensor_l2_norm", None):
    clip_grads.l2_norm_impl = _norm_on_device


def fused(function: Function) -> Function:
    """Compiles elementwise operations into one kernel on a GPU, as megatron-core does."""
    compile_function: Any = jit_fuser if torch.cuda.is_available() else lambda plain: plain
    compiled: Function = compile_function(function)
    return compiled


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
        context: Tensor = self.core_attention(*arguments, **options)
        return context
