"""Packed sequences: their description, computed once a micro-batch, and the attention over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from verl_mg.megatron.ulysses import to_heads, to_tokens


@dataclass
class PackedSequences(PackedSeqParams):
    """Sequences side by side on one token axis of T, with what every layer's attention needs to know of them.

    cos, sin: (T, 1, head_dim), the rotary tables at each token's position in its own sequence.
    by_length: for each length L that occurs, the token indices (n, L) of its n sequences (where no kernel for
    ragged sequences exists, equal lengths are computed together, so nothing is padded).
    back: (T,), where each token stands in the concatenation of `by_length`.
    experts: (T / (cp * tp), layers, k) int16, which experts this rank's own tokens are to take, see `routing`.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    by_length: tuple[Tensor, ...] = ()
    back: Tensor | None = None
    experts: Tensor | None = None


def describe(
    lengths: Tensor, inverse_frequencies: Tensor, attention_scaling: float, dtype: torch.dtype
) -> PackedSequences:
    """The description of sequences of the given lengths (n,) int64, on the device of `inverse_frequencies`.

    inverse_frequencies: (head_dim / 2,) float32, as `transformers` computes them.
    """
    device = inverse_frequencies.device
    ends = lengths.cumsum(0)
    total, longest = int(ends[-1]), int(lengths.max())
    starts = ends - lengths
    positions = torch.arange(total) - torch.repeat_interleave(starts, lengths)
    angles = positions.to(device, torch.float32)[:, None] * inverse_frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    by_length, back = ((), None) if has_ragged_kernel(device, dtype) else _group_by_length(starts, lengths)
    cumulative = F.pad(ends, (1, 0)).to(device, torch.int32)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cos=(angles.cos() * attention_scaling).to(dtype),
        sin=(angles.sin() * attention_scaling).to(dtype),
        by_length=tuple(group.to(device) for group in by_length),
        back=None if back is None else back.to(device),
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

    torch's variable-length kernel where it exists (CUDA, half precision), else its scaled-dot-product attention,
    once for each length that occurs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert pg_collection is not None
        self.softmax_scale, self.cp_group = softmax_scale, pg_collection.cp

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
        assert packed is not None and packed.cos is not None and packed.sin is not None
        query, key, value = to_heads(query, key, value, self.cp_group)
        query, key = _rotate(query, packed.cos, packed.sin), _rotate(key, packed.cos, packed.sin)
        if has_ragged_kernel(query.device, query.dtype):
            context = self._ragged_kernel(query, key, value, packed)
        else:
            context = self._length_by_length(query, key, value, packed)
        return to_tokens(context, self.cp_group).flatten(1)

    def _ragged_kernel(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        cumulative, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        options: dict[str, Any] = {"scale": self.softmax_scale, "window_size": (-1, 0)}
        context = varlen_attn(query, key, value, cumulative, cumulative, longest, longest, **options)
        assert isinstance(context, Tensor)
        return context

    def _length_by_length(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        assert packed.back is not None
        repeat = query.shape[1] // key.shape[1]
        outputs = []
        for tokens in packed.by_length:
            q, k, v = (part[tokens].transpose(1, 2) for part in (query, key, value))  # (n, heads, L, d)
            k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
            outputs.append(out.transpose(1, 2).reshape(-1, *query.shape[1:]))
        return torch.cat(outputs)[packed.back]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split form of Llama (arXiv:2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
