"""Gated delta net (arXiv:2412.06464) of Qwen3-Next and Qwen3.5 over packed sequences.

Parameters have the names and the order of rows of `megatron.core.ssm.gated_delta_net`. That module itself needs
flash-linear-attention also on a CPU, sequences that context-parallel ranks divide, and one group of these ranks for all
micro-batches. T, cp and tp as in `attention`:

    (T / cp / tp, h) -> projection -> (T / cp, heads / tp, ...) -> exchange -> (T, heads / tp / cp, ...)
    -> convolution of q, k and v -> delta rule -> norm, gate -> exchange -> (T / cp, heads / tp, d) -> projection
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from verl_mg.choice import Choice
from verl_mg.megatron.delta_rule import convolve, delta_rule, has_fused_kernels
from verl_mg.megatron.layers import RMSNorm
from verl_mg.megatron.packed_sequences import PackedSequences
from verl_mg.models.attention_config import LinearConfig
from verl_mg.training.packed_attention import heads_of_rank, to_heads, to_tokens


@dataclass(frozen=True)
class Projections:
    """Classes of the linear layers."""

    inputs: Any = ColumnParallelLinear  # to queries, keys, values, gates, strengths and decays
    outputs: Any = RowParallelLinear  # to the output


def linear_attention_spec(linear: LinearConfig, projections: Projections | None = None) -> ModuleSpec:
    """Returns the specification of a gated delta net in place of a layer's attention."""
    return ModuleSpec(GatedDeltaNet, {"linear": linear, "projections": projections or Projections()})


class GatedDeltaNet(MegatronModule):
    """Gated delta net on the key heads of this tensor-parallel rank, and the value heads that belong to them."""

    # `A_log` has the dtype of the model, as in megatron-core and `transformers`, although engines may have it in
    # float32.

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        linear: LinearConfig,
        projections: Projections,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.linear = layer_number, linear
        tp = pg_collection.tp.size()
        self.key_heads, self.value_heads = linear.key_heads // tp, linear.value_heads // tp
        options = {"config": config, "bias": False, "tp_group": pg_collection.tp}
        width = linear.convolved_width + linear.value_width + 2 * linear.value_heads
        self.in_proj = projections.inputs(
            config.hidden_size,
            width,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            is_expert=False,
            **options,
        )
        self.out_proj = projections.outputs(
            linear.value_width,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            **options,
        )
        place = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        channels = linear.convolved_width // tp
        self.conv1d = torch.nn.utils.skip_init(
            torch.nn.Conv1d, channels, channels, linear.kernel, groups=channels, bias=False, **place
        )
        self.dt_bias = torch.nn.Parameter(torch.empty(self.value_heads, **place))
        self.A_log = torch.nn.Parameter(torch.empty(self.value_heads, **place))
        for weight in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
        self.out_norm = RMSNorm(config, linear.value_dim, eps=config.layernorm_epsilon)
        self.out_norm.zero_centered = False  # unlike the other norms of these models
        selective = config.recompute_granularity == "selective"
        self._checkpoints_core = selective and "core_attn" in config.recompute_modules

    def chosen(self) -> Choice:
        """Returns what this layer's delta rule computes with."""
        if has_fused_kernels(self.dt_bias):
            return Choice("linear attention", "flash-linear-attention")
        # GPU: the kernels of flash-linear-attention, where they are installed and the job is not deterministic.
        # GPU-TEST: tests/run/test_start_table.py::test_megatron_model_on_cuda_says_what_its_layers_compute_with
        # GPU-RAN: not yet
        slow = "torch's own kernels compute the delta rule. Install flash-linear-attention."
        is_wanted = torch.are_deterministic_algorithms_enabled()
        return Choice("linear attention", "torch, chunk by chunk", "" if is_wanted else slow)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, packed_seq_params: PackedSequences, **_: Any
    ) -> tuple[Tensor, None]:
        """Computes the layer: (T / cp / tp, 1, h) -> (T / cp / tp, 1, h), and no bias."""
        packed, group, linear = packed_seq_params, packed_seq_params.cp_group, self.linear
        # A state passes through all tokens of a sequence: ranks cannot have chunks of it, and divide the heads.
        assert group and not packed.zigzag
        keys, values = self.key_heads * linear.key_dim, self.value_heads * linear.value_dim
        projected = self.in_proj(hidden_states)[0].squeeze(1)
        q, k, v, z, b, a = projected.split([keys, keys, values, values, self.value_heads, self.value_heads], dim=-1)
        q, k = (x.unflatten(-1, (self.key_heads, -1)) for x in (q, k))
        # What belongs to value heads is exchanged as one tensor; a head's gate and decay go where its values go.
        of_values = torch.cat([x.unflatten(-1, (self.value_heads, -1)) for x in (v, z, b, a)], dim=-1)
        of_values, q, k = to_heads(of_values, q, k, group)
        v, z, b, a = of_values.split([linear.value_dim, linear.value_dim, 1, 1], dim=-1)
        weights = *self._local_filters(group), heads_of_rank(self.A_log, group), heads_of_rank(self.dt_bias, group)

        def core(*tensors: Tensor) -> Tensor:
            return self._core(packed, *tensors)

        inputs = q, k, v, b.squeeze(-1), a.squeeze(-1), *weights
        recomputes = self._checkpoints_core and torch.is_grad_enabled()
        context = checkpoint(core, False, *inputs) if recomputes else core(*inputs)
        gated = (self.out_norm(context) * F.silu(z.float())).to(context.dtype)
        return self.out_proj(to_tokens(gated, group).flatten(1).unsqueeze(1))[0], None

    def _core(
        self, packed: PackedSequences, q: Tensor, k: Tensor, v: Tensor, b: Tensor, a: Tensor, *weights: Tensor
    ) -> Tensor:
        """Computes convolution and delta rule of this rank's heads: (T, heads, ...) -> (T, value heads, d_v)."""
        filters, a_log, dt_bias = weights
        if packed.keys is not None:  # the state of a sequence depends on the tokens that another one computes
            q, k, v, b, a = (x[packed.keys] for x in (q, k, v, b, a))
        description = packed.chunks, packed.cu_seqlens_kv
        flat = [x.flatten(1) for x in (q, k, v)]
        convolved = convolve(torch.cat(flat, dim=1), filters, *description).split([x.shape[1] for x in flat], dim=1)
        q, k, v = (x.unflatten(1, like.shape[1:]) for x, like in zip(convolved, (q, k, v), strict=True))
        # A key head serves several neighbouring value heads.
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
        # In float32: the decays of a chunk are summed up before their exponential is taken.
        decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
        context = delta_rule(q, k, v, decay, b.float().sigmoid(), *description)
        return context if packed.keys is None else context[packed.places_among_keys]

    def _local_filters(self, group: dist.ProcessGroup) -> tuple[Tensor]:
        """Returns the filters of this context-parallel rank's heads: (elements of q, k and v, kernel)."""
        linear, filters = self.linear, self.conv1d.weight.squeeze(1)
        if group.size() == 1:
            return (filters,)
        keys = self.key_heads * linear.key_dim
        heads = [self.key_heads, self.key_heads, self.value_heads]
        parts = filters.split([keys, keys, self.value_heads * linear.value_dim])
        local = [heads_of_rank(x.unflatten(0, (n, -1)), group) for x, n in zip(parts, heads, strict=True)]
        return (torch.cat([x.flatten(0, 1) for x in local]),)
