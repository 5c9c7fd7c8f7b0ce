"""Attention over packed sequences: exchanges between context-parallel ranks, and kernels.

Shapes: T tokens of a micro-batch, all sequences one after the other on one axis without padding; a context-parallel
rank has T / cp of them outside attention, and a tensor-parallel rank T / (cp * tp) outside the projections.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import all_to_all, set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from verl_mg.megatron.gathered_attention import attend_to_gathered, gather_tokens
from verl_mg.megatron.packed_sequences import PackedSequences
from verl_mg.megatron.rotary_embedding import rotate
from verl_mg.training.flash_attention import takes_value_width
from verl_mg.training.flex_attention import attend_with_block_mask


def has_ragged_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether torch has a kernel for packed sequences of different lengths.

    Args:
        device: device of the model.
        dtype: dtype of queries, keys and values.
    """
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Exchanges tokens for heads: from all heads of a token shard to a head shard of all tokens.

    Context parallelism of DeepSpeed Ulysses (arXiv:2309.14509): outside attention a rank has neighbouring tokens and
    all heads, inside it has all tokens and a part of the heads. Key-value heads that cp does not divide are repeated
    until it does. The three tensors may differ in width d, keys and values in their number of heads.

    Args:
        query: (T / cp, heads, d); cp divides the heads.
        key: (T / cp, kv_heads, d).
        value: (T / cp, kv_heads, d).
        group: the cp ranks that share the sequences.

    Returns:
        Query (T, heads / cp, d), and key and value (T, n, d), where n is lcm(kv_heads, cp) / cp and divides
        heads / cp.
    """
    size = group.size()
    if size == 1:
        return query, key, value
    parts = [part.repeat_interleave(size // gcd(part.shape[1], size), dim=1) for part in (query, key, value)]
    by_rank = [part.unflatten(1, (size, -1)) for part in parts]  # (T / cp, cp, n, d)
    exchanged: Tensor = all_to_all(group, torch.cat([part.flatten(2) for part in by_rank], dim=2).transpose(0, 1))
    local = exchanged.flatten(0, 1).split([part.shape[2] * part.shape[3] for part in by_rank], dim=1)
    query, key, value = (part.unflatten(1, like.shape[2:]) for part, like in zip(local, by_rank, strict=True))
    return query, key, value


def to_tokens(context: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges heads for tokens, the inverse of `to_heads`.

    Args:
        context: (T, heads / cp, d), output of attention.
        group: the cp ranks that share the sequences.

    Returns:
        (T / cp, heads, d), all heads of this rank's tokens.
    """
    if group.size() == 1:
        return context
    exchanged: Tensor = all_to_all(group, context.unflatten(0, (group.size(), -1)))
    return exchanged.transpose(0, 1).flatten(1, 2)


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence, rotary embedding included.

    The heads are those of this tensor-parallel rank; context-parallel ranks divide them among themselves. Uses torch's
    variable-length kernel where it exists (CUDA, half precision), with a softcap or sinks a kernel of FlexAttention.
    Elsewhere scaled-dot-product attention once for each length that occurs, with a softcap or sinks plain matrix
    products. Where ranks exchange keys and values, see `local_context`, FlexAttention too, elsewhere a mask of all
    pairs of tokens.

    Attributes:
        softmax_offset: (heads / tp,) parameter of the attention sinks; None without. A head's softmax has this score
            in addition to those of the keys, and no value for it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        **__: Any,
    ) -> None:
        """Creates the module.

        Args:
            config: megatron-core's configuration.
            window: number of tokens that a token attends to at most, itself included; None for all.
            softcap: bound c of attention scores z, as c * tanh(z / c) (Gemma 2, arXiv:2408.00118); None for none.
            sinks: whether each head has an attention sink (gpt-oss, arXiv:2508.10925), a parameter.
        """
        super().__init__(config=config)
        self.window, self.softcap = window, softcap
        self.scale = config.softmax_scale
        self.softmax_offset: torch.nn.Parameter | None = None
        if sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            options: dict[str, Any] = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, **options))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Computes attention over packed sequences.

        Args:
            query: (T / cp, heads, d).
            key: (T / cp, kv_heads, d).
            value: (T / cp, kv_heads, d).
            attention_mask: not read.
            attn_mask_type: not read; attention is causal.
            attention_bias: not read.
            packed_seq_params: description of the sequences.

        Returns:
            (T / cp, heads * d).
        """
        packed = packed_seq_params
        assert packed and packed.cp_group
        if packed.zigzag:
            return self.local_context(*self.with_positions(query, key, value, packed), packed).flatten(1)
        heads = to_heads(query, key, value, packed.cp_group)
        query, key, value = self.with_positions(*heads, packed)
        if packed.keys is not None:
            # The backward pass sums the gradients of all sequences that share a key.
            key, value = key[packed.keys], value[packed.keys]
        if not has_ragged_kernel(query.device, query.dtype):
            context = self._length_by_length(query, key, value, packed)
        elif self.softcap is None and self.softmax_offset is None:
            context = self._with_ragged_kernel(query, key, value, packed)
        else:
            context = self._with_block_mask(query, key, value, packed)
        return to_tokens(context, packed.cp_group).flatten(1)

    def local_context(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """Computes attention of this rank's tokens, which are two chunks of each sequence, to those of all ranks.

        Args:
            query: (T / cp, heads, d).
            key: (T / cp, kv_heads, d).
            value: (T / cp, kv_heads, d_v).
            packed: description of the sequences.

        Returns:
            (T / cp, heads, d_v).
        """
        key, value = self._gathered(key, value, packed)
        if has_ragged_kernel(query.device, query.dtype):
            return self._with_block_mask(query, key, value, packed)
        return self._length_by_length(query, key, value, packed)

    def with_positions(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Applies rotary embeddings.

        Args:
            query: (T, heads, d).
            key: (T, kv_heads, d).
            value: (T, kv_heads, d), returned as it is.
            packed: description of the sequences.

        Returns:
            Query, key and value of the same shapes.
        """
        return self.rotated(query, packed), self.rotated(key, packed), value

    def rotated(self, x: Tensor, packed: PackedSequences) -> Tensor:
        """Applies the rotary embedding to queries or keys.

        Args:
            x: (T, heads, d).
            packed: description of the sequences.

        Returns:
            (T, heads, d).
        """
        assert packed.cos is not None and packed.sin is not None
        return rotate(x, packed.cos, packed.sin)

    def _with_ragged_kernel(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        left_window = -1 if self.window is None else self.window - 1
        options: dict[str, Any] = {"scale": self.scale, "window_size": (left_window, 0)}
        repeat, width = query.shape[1] // key.shape[1], value.shape[2]
        if repeat > 1 and "enable_gqa" in signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        elif repeat > 1:  # torch 2.11
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        if not takes_value_width(query.shape[2], width):
            value = F.pad(value, (0, query.shape[2] - width))
        ends, longest = (packed.cu_seqlens_q, packed.cu_seqlens_kv), (packed.max_seqlen_q, packed.max_seqlen_kv)
        # With fewer queries than keys the kernel takes the queries for the last tokens of their sequence.
        context = varlen_attn(query, key, value, *ends, *longest, **options)
        assert isinstance(context, Tensor)
        return context[..., :width]

    def _with_block_mask(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        mask, sinks = packed.block_mask(self.window), self._sinks(packed)
        return attend_with_block_mask(query, key, value, mask, self.scale, self.softcap, sinks)

    def _sinks(self, packed: PackedSequences) -> Tensor | None:
        """Returns the sinks of the heads that this rank attends with; None without."""
        if self.softmax_offset is None or packed.zigzag:
            return self.softmax_offset
        assert packed.cp_group is not None
        return self.softmax_offset.chunk(packed.cp_group.size())[packed.cp_group.rank()]

    def _gathered(self, key: Tensor, value: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor]:
        assert packed.cp_group is not None
        order, group = packed.gathered_order, packed.cp_group
        return gather_tokens(key, order, group), gather_tokens(value, order, group)

    def _length_by_length(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        sinks = self._sinks(packed)
        if packed.zigzag:
            assert packed.lengths is not None and packed.cp_group is not None
            cp, rank = packed.cp_group.size(), packed.cp_group.rank()
            attend = partial(self._attend_where, sinks=sinks)
            return attend_to_gathered(attend, query, key, value, packed.lengths, self.window, cp, rank)
        sizes, key_sizes = ([run[0] * run[kind] for run in packed.runs] for kind in (1, 2))
        outputs = []
        parts = query.split(sizes), key.split(key_sizes), value.split(key_sizes)
        for (count, *_), *heads in zip(packed.runs, *parts, strict=True):
            q, k, v = (part.unflatten(0, (count, -1)).transpose(1, 2) for part in heads)  # (count, heads, length, d)
            outputs.append(self._attend(q, k, v, sinks).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Attends over sequences of equal length.

        Args:
            query: (n, heads, L, d), of the last L tokens of a sequence.
            key: (n, kv_heads, K, d).
            value: (n, kv_heads, K, d_v).
            sinks: (heads,); None without.

        Returns:
            (n, heads, L, d_v).
        """
        length, keys = query.shape[2], key.shape[2]
        unbounded = self.window is None or self.window >= keys
        if self.softcap is None and sinks is None and unbounded and length == keys:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=True)
        visible = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
        if self.window is not None:
            visible = visible.triu(keys - length + 1 - self.window)
        return self._attend_where(query, key, value, visible, sinks)

    def _attend_where(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
        """Attends from L queries to the visible ones of K keys, (L, K) bool, of each of n sequences."""
        if self.softcap is None and sinks is None:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=visible, scale=self.scale, enable_gqa=True
            )
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        scores = query @ key.mT * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            additional = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, additional], dim=-1)
        shares = scores.softmax(-1, dtype=torch.float32)[..., : visible.shape[1]]
        return shares.to(value.dtype) @ value
