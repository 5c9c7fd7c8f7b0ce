"""Packed sequences: their description, computed once a micro-batch, and the attention over them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from verl_mg.megatron.ulysses import to_heads, to_tokens


@dataclass
class PackedSequences(PackedSeqParams):
    """Sequences side by side on one token axis of T, with what every layer's attention needs to know of them.

    cos, sin: (T, 1, rotary width), the rotary tables at each token's position in its own sequence.
    experts: (T / (cp * tp), layers, k) int16, which experts this rank's own tokens are to take, see `routing`.
    context: the ranks that have a run of T / cp tokens each.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    experts: Tensor | None = None
    context: dist.ProcessGroup | None = None

    @cached_property
    def by_length(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """For each length L that occurs, the token indices (n, L) of its n sequences, and back (T,).

        Where no kernel for ragged sequences does, equal lengths are computed together, so that nothing is padded.
        back: where each token stands in the concatenation of the indices.
        """
        ends = self.cu_seqlens_q.long()
        groups, back = _group_by_length(ends[:-1].cpu(), ends.diff().cpu())
        return tuple(group.to(ends.device) for group in groups), back.to(ends.device)


def describe(
    lengths: Tensor, inverse_frequencies: Tensor, attention_scaling: float, dtype: torch.dtype
) -> PackedSequences:
    """The description of sequences of the given lengths (n,) int64, on the device of `inverse_frequencies`.

    inverse_frequencies: (rotary width / 2,) float32, as `transformers` computes them.
    """
    device = inverse_frequencies.device
    ends = lengths.cumsum(0)
    total, longest = int(ends[-1]), int(lengths.max())
    starts = ends - lengths
    positions = torch.arange(total) - torch.repeat_interleave(starts, lengths)
    angles = positions.to(device, torch.float32)[:, None] * inverse_frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    cumulative = F.pad(ends, (1, 0)).to(device, torch.int32)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cos=(angles.cos() * attention_scaling).to(dtype),
        sin=(angles.sin() * attention_scaling).to(dtype),
    )


def has_ragged_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a kernel for sequences of different lengths side by side."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def _group_by_length(starts: Tensor, lengths: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    groups = tuple(starts[lengths == length][:, None] + torch.arange(length) for length in lengths.unique().tolist())
    order = torch.cat([group.reshape(-1) for group in groups])
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return groups, back


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence, rotary embedding included.

    The heads are those of this tensor-parallel rank, and the context-parallel ranks share them out among each other.

    torch's variable-length kernel where it exists (CUDA, half precision) and can, else its scaled-dot-product
    attention, once for each length that occurs; plain products where they are bent by a `softcap`.
    window: how many tokens a token attends to at most, itself included.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        window: int | None = None,
        softcap: float | None = None,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self.window, self.softcap = window, softcap
        self.scale = config.softmax_scale

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
        """query (T / cp, heads, d), key and value (T / cp, kv_heads, d) -> (T / cp, heads * d)."""
        packed = packed_seq_params
        assert packed and packed.context and packed.cos is not None and packed.sin is not None
        query, key, value = self.with_positions(*to_heads(query, key, value, packed.context), packed.cos, packed.sin)
        if has_ragged_kernel(query.device, query.dtype) and self.softcap is None:
            context = self._ragged_kernel(query, key, value, packed)
        else:
            context = self._length_by_length(query, key, value, packed)
        return to_tokens(context, packed.context).flatten(1)

    def with_positions(
        self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the whole token axis, (T, heads, d) and twice (T, kv_heads, d) -> the same, with rotary embeddings."""
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def _ragged_kernel(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        repeat, width = query.shape[1] // key.shape[1], value.shape[2]
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        value = F.pad(value, (0, query.shape[2] - width))  # the kernel knows one width for all
        cumulative, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        before = -1 if self.window is None else self.window - 1
        options: dict[str, Any] = {"scale": self.scale, "window_size": (before, 0)}
        context = varlen_attn(query, key, value, cumulative, cumulative, longest, longest, **options)
        assert isinstance(context, Tensor)
        return context[..., :width]

    def _length_by_length(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        groups, back = packed.by_length
        repeat = query.shape[1] // key.shape[1]
        outputs = []
        for tokens in groups:
            q, k, v = (part[tokens].transpose(1, 2) for part in (query, key, value))  # (n, heads, L, d)
            k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
            outputs.append(self._attend(q, k, v).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[back]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query, key (n, heads, L, d), value (n, heads, L, d_v) -> (n, heads, L, d_v)."""
        length = query.shape[2]
        unbounded = self.window is None or self.window >= length
        if self.softcap is None and unbounded:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        if self.window is not None:
            seen = seen.triu(1 - self.window)
        if self.softcap is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=self.scale)
        scores = self.softcap * torch.tanh(query @ key.mT * (self.scale / self.softcap))
        return scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split form of Llama (arXiv:2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
