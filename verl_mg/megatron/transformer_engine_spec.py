"""Modules of the layers with Transformer Engine's kernels; imported only where it is installed.

Transformer Engine's modules fuse a norm into the following linear layer, compute all experts of a rank in grouped
products, and add weight gradients to the float32 buffers themselves. Routing and context parallelism are ours:

- `Router` has scores in float32 and replays the experts of the rollout, which megatron-core's fused router cannot.
- Transformer Engine's attention gets all tokens and a part of the heads, see `to_heads`. With
  `megatron.transformer.cp_comm_type` it exchanges keys and values itself.

Where its kernels are missing a feature, attention is torch's: float32, a softcap, micro-batches whose rows share
prefixes, deterministic jobs, GPUs before Hopper without FlashAttention 2, and a cuDNN for which it has no kernel. There
it would pad rows and multiply whole matrices, or need memory of the square of the rows' length.
"""

from __future__ import annotations

import logging
import os
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import (
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from transformer_engine.pytorch import DotProductAttention
from transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention import _attention_backends
from transformer_engine.pytorch.attention.dot_product_attention.utils import FlashAttentionUtils
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

from verl_mg import device
from verl_mg.choice import Choice
from verl_mg.megatron.attention import PackedAttention
from verl_mg.megatron.core_version import submodules
from verl_mg.megatron.latent_attention import LATENT_NORM_EPS, MultiLatentAttention, PackedMLA
from verl_mg.megatron.layers import JointlyNormedAttention, normalize_output
from verl_mg.megatron.linear_attention import Projections, linear_attention_spec
from verl_mg.megatron.packed_sequences import PackedSequences
from verl_mg.megatron.routing import RoutedLayer, Router
from verl_mg.models.hf_config import HFConfig
from verl_mg.training.packed_attention import HOPPER, has_ragged_kernel

log = logging.getLogger(__name__)

TE = "Transformer Engine"
PROBED = 128  # tokens on which attention chooses its kernel at the start
NO_KERNEL = "No dot product attention backend is available"
"""Beginning of Transformer Engine's error where it has no kernel for the inputs."""


def config_fields(c: HFConfig) -> dict[str, Any]:
    """Returns fields of `TransformerConfig` that belong to these modules."""
    fields: dict[str, Any] = {"transformer_impl": "transformer_engine"}
    return fields | ({"moe_grouped_gemm": True, "moe_permute_fusion": True} if c.experts else {})


def block_spec(c: HFConfig, layers: range) -> TransformerBlockSubmodules:
    """Returns the modules of consecutive layers."""
    specs = [_layer_spec(c, layer) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TENorm)


def _layer_spec(c: HFConfig, number: int) -> ModuleSpec:
    experts = c.experts if c.has_experts(number) else None
    layer: ModuleSpec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts.count if experts else None,
        moe_grouped_gemm=True,
        qk_layernorm=(c.qk_norm and not c.joint_qk_norm) or c.latent is not None,
        multi_latent_attention=c.latent is not None,
    )
    parts = layer.submodules
    attention = parts.self_attention.submodules
    fused = has_packed_attention()
    if c.latent:
        parts.self_attention.module = FusedLatentAttention
        interleaved = {"interleaved": c.latent.interleaved}
        attention.core_attention = ModuleSpec(FusedMLA if fused else PackedMLA, interleaved)
    elif c.linear and c.has_linear_attention(number):
        parts.self_attention = linear_attention_spec(
            c.linear, Projections(TELayerNormColumnParallelLinear, TERowParallelLinear)
        )
    else:
        kind = FusedAttention if fused and c.attention_softcap is None else PackedAttention
        options = {"window": c.window(number), "softcap": c.attention_softcap}
        attention.core_attention = ModuleSpec(kind, options)
        if c.joint_qk_norm:
            parts.self_attention.module = JointlyNormedAttention
    if experts:
        layer.module = RoutedLayer
        # megatron-core's fused router has neither scores in float32 nor experts of the rollout.
        submodules(parts.mlp).router = partial(Router, experts=experts)
    if c.sandwich_norms:
        attention.linear_proj = submodules(parts.mlp).linear_fc2 = NormedTERowParallelLinear
    return layer


def has_packed_attention() -> bool:
    """Returns whether Transformer Engine has a kernel for packed rows: cuDNN's from Hopper on, or FlashAttention 2."""
    # GPU: with Transformer Engine attention in bfloat16 is cuDNN's from Hopper on, in deterministic jobs torch's.
    # GPU-TEST: tests/megatron/test_transformer_engine_attention.py::
    # test_attention_of_deterministic_jobs_asks_for_less_than_a_gibibyte
    # GPU-RAN: not yet
    # The deterministic backward pass of cuDNN needs 128 bytes for each pair of tokens and each head on a Hopper: 32 GiB
    # for four rows of 2,048 tokens and 16 heads. The memory of torch's grows with the tokens only.
    if torch.are_deterministic_algorithms_enabled():
        return False
    # Otherwise it would compute the attention of padded rows by matrix products. Its own record, because FlashAttention
    # 4, whose kernels need a Hopper, is a part of a package named `flash_attn` too.
    return torch.cuda.get_device_capability() >= HOPPER or FlashAttentionUtils.is_installed


class FusedAttention(PackedAttention):
    """Packed attention by Transformer Engine: cuDNN's kernel or FlashAttention, and a fused rotary embedding."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # A kernel is fixed to numbers of heads and ranks, which depend on how many ranks share a micro-batch.
        self._kernels: dict[tuple[int, ...], Any] = {}  # None where Transformer Engine has none for the shape

    def chosen(self) -> Choice:
        """Returns what computes this layer's attention: Transformer Engine chooses when it is given some tokens."""
        by_torch, place, c = super().chosen(), device.current_device(), self.config
        if not has_ragged_kernel(place, c.params_dtype):
            return by_torch
        heads = c.num_attention_heads // c.tensor_model_parallel_size
        kv_heads, widths = max(1, (c.num_query_groups or heads) // c.tensor_model_parallel_size), [c.kv_channels] * 2
        if c.multi_latent_attention:
            kv_heads, widths = heads, [c.qk_head_dim + c.qk_pos_emb_head_dim, c.v_head_dim]
        options: dict[str, Any] = {"device": place, "dtype": c.params_dtype, "requires_grad": True}
        query = torch.zeros(PROBED, heads, widths[0], **options)
        key, value = (torch.zeros(PROBED, kv_heads, width, **options) for width in widths)
        lengths, ends = torch.tensor([PROBED]), torch.tensor([0, PROBED], dtype=torch.int32, device=place)
        packed = PackedSequences(
            lengths=lengths,
            key_lengths=lengths,
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=PROBED,
            max_seqlen_kv=PROBED,
        )
        with torch.enable_grad():
            context = self._with_fused_kernel(query, key, value, packed)
        if context is None:
            return by_torch._replace(
                warning="Transformer Engine has no kernel for it. Install the cuDNN of torch's pin."
            )
        if _attention_backends["use_flash_attention"]:
            return by_torch._replace(chosen=f"FlashAttention {_attention_backends['flash_attention_backend']} by {TE}")
        if _attention_backends["use_fused_attention"]:
            return by_torch._replace(chosen=f"cuDNN by {TE}")
        return Choice(by_torch.part, f"whole matrices by {TE}", "not fused. Unset NVTE_UNFUSED_ATTN.")

    def rotated(self, x: Tensor, packed: PackedSequences) -> Tensor:
        """Applies the rotary embedding to queries or keys in one kernel, in float32: (T, heads, d) -> (T, heads, d)."""
        assert packed.cos is not None
        scaled_in_part = packed.attention_scaling != 1 and packed.cos.shape[-1] < x.shape[-1]
        # Its kernel begins each sequence at position 0, and has no factor for only the rotated elements of a head.
        if packed.keys is not None or scaled_in_part:
            return super().rotated(x, packed)
        cp, rank = (packed.cp_group.size(), packed.cp_group.rank()) if packed.zigzag else (1, 0)  # type: ignore[union-attr]
        rotated: Tensor = apply_rotary_pos_emb(
            x,
            packed.angles_of_halves,
            tensor_format="thd",
            fused=True,
            cu_seqlens=packed.cu_seqlens_q,
            cp_size=cp,
            cp_rank=rank,
        )
        return rotated if packed.attention_scaling == 1 else rotated * packed.attention_scaling

    def local_context(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """Computes attention of this rank's tokens; the kernel exchanges keys and values with the other ranks."""
        context = self._with_fused_kernel(query, key, value, packed)
        return super().local_context(query, key, value, packed) if context is None else context

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        # With fewer queries than keys its causal mask would take the queries for the first tokens; in other versions of
        # cuDNN there is no kernel, and it multiplies whole matrices without saying so.
        context = self._with_fused_kernel(query, key, value, packed) if packed.keys is None else None
        return super()._attend(query, key, value, packed) if context is None else context

    def _with_fused_kernel(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor | None:
        """Computes attention; None where Transformer Engine has no kernel for it."""
        if not has_ragged_kernel(query.device, query.dtype):
            return None
        group = packed.cp_group if packed.zigzag else None
        shape = (query.shape[1], key.shape[1], query.shape[2], value.shape[2], group.size() if group else 1)
        if shape not in self._kernels:
            self._kernels[shape] = self._kernel(*shape[:4], group)
        if self._kernels[shape] is None:
            return None
        # Padding of sequences counts as tokens: by the same tensors the kernel sees that there is none between them.
        lengths = {"cu_seqlens_q": packed.cu_seqlens_q, "cu_seqlens_kv": packed.cu_seqlens_kv}
        padded = {"cu_seqlens_q_padded": packed.cu_seqlens_q, "cu_seqlens_kv_padded": packed.cu_seqlens_kv}
        try:
            context: Tensor = self._kernels[shape](
                query,
                key,
                value,
                max_seqlen_q=packed.max_seqlen_q,
                max_seqlen_kv=packed.max_seqlen_kv,
                **lengths,
                **(padded if group else {}),
            )
        except ValueError as error:
            if not str(error).startswith(NO_KERNEL):
                raise
            self._kernels[shape] = None
            _warn_of_no_kernel()
            return None
        return context.unflatten(-1, (query.shape[1], -1))

    def _kernel(
        self, heads: int, kv_heads: int, key_width: int, value_width: int, group: dist.ProcessGroup | None
    ) -> Any:
        # Else Transformer Engine multiplies whole matrices where it has no kernel, without saying so: on an H100 with
        # an older cuDNN a model of 1.7 billion parameters ran at 3 % of the peak, and out of memory.
        os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")
        exchange: dict[str, Any] = {}
        if group:
            exchange = {
                "cp_group": group,
                "cp_global_ranks": dist.get_process_group_ranks(group),
                "cp_stream": torch.cuda.Stream(),
                "cp_comm_type": self.config.cp_comm_type,
            }
        return DotProductAttention(
            heads,
            (key_width, value_width),
            num_gqa_groups=kv_heads,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            window_size=None if self.window is None else (self.window - 1, 0),
            softmax_scale=self.scale,
            **exchange,
        )


@cache
def _warn_of_no_kernel() -> None:
    log.warning(
        "Transformer Engine has no attention kernel for packed rows here, torch's computes it. "
        "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints the reasons; often cuDNN is older than the one that torch requires."
    )


class FusedMLA(FusedAttention, PackedMLA):
    """Multi-head latent attention by Transformer Engine, whose kernels take values narrower than keys."""


class FusedLatentAttention(MultiLatentAttention):
    """Multi-head latent attention with norms fused into the up projections, and the same down projections on all ranks.

    On a tensor-parallel rank:

        (T / tp, h) -> down projection -> local tokens (T / tp, rank) -> norm and up projection -> (T, heads / tp, ...)
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.linear_kv_up_proj.eps = LATENT_NORM_EPS
        # Otherwise megatron-core 0.16.1 counts the gradients of all ranks in the norm, which are the same.
        self.linear_kv_down_proj.weight.tensor_model_parallel = False
        if self.config.q_lora_rank is not None:
            self.linear_q_up_proj.eps = LATENT_NORM_EPS
            self.linear_q_down_proj.weight.tensor_model_parallel = False

    def latents(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects hidden states to latents, not yet normalized, and rotary keys, see `MultiLatentAttention`."""
        c = self.config
        q_latent = hidden_states if c.q_lora_rank is None else self.linear_q_down_proj(hidden_states)[0]
        kv_and_rotary = self.linear_kv_down_proj(hidden_states)[0]
        kv_latent, rotary_key = kv_and_rotary.split([c.kv_lora_rank, c.qk_pos_emb_head_dim], dim=-1)
        if c.sequence_parallel:
            # The backward pass sums the gradients from the heads of all ranks.
            rotary_key = gather_from_sequence_parallel_region(rotary_key, group=self.pg_collection.tp)
        return q_latent, kv_latent, rotary_key


class NormedTERowParallelLinear(TERowParallelLinear):  # type: ignore[misc]
    """Row-parallel linear layer whose output is normalized, as in Gemma 2; see `NormedRowParallelLinear`."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **arguments: Any) -> None:
        super().__init__(input_size, output_size, config=config, **arguments)
        self.post_layernorm = TENorm(config, output_size, eps=config.layernorm_epsilon)
        self.register_forward_hook(normalize_output)
