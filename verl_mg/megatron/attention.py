"""Attention over packed sequences: their description, context parallelism, grouped and multi-head latent attention.

Shapes: T tokens of a micro-batch, all sequences one after the other on one axis without padding; a context-parallel
rank has T / cp of them outside attention, and a tensor-parallel rank T / (cp * tp) outside the projections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    all_to_all,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from verl_mg.device import copy_to
from verl_mg.megatron.core_version import MLASelfAttention, fused
from verl_mg.megatron.gathered_attention import attend_to_gathered

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of latents: the checkpoints' modules use it whatever rms_norm_eps is."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Description of packed sequences, computed once for a micro-batch and read by the attention of every layer."""

    cos: Tensor | None = None
    """(T, 1, rotary width) float32, cosines of the rotary embedding at each token's position in its sequence; with
    `zigzag` of this rank's tokens only."""
    sin: Tensor | None = None
    """(T, 1, rotary width) float32, sines of the rotary embedding; with `zigzag` of this rank's tokens only."""
    inverse_frequencies: Tensor | None = None
    """(rotary width / 2,) float32, frequencies of the rotary embedding."""
    attention_scaling: float = 1.0
    """Factor of cosines and sines of the rotary embedding, which `cos` and `sin` contain."""
    lengths: Tensor | None = None
    """(n,) int64 on the CPU, tokens of each sequence."""
    experts: Mapping[int, Tensor] | None = None
    """(T / (cp * tp), k) int16 of each layer, prescribed experts of this rank's tokens, see `routing`."""
    cp_group: dist.ProcessGroup | None = None
    """Ranks that share the micro-batch."""
    zigzag: bool = False
    """Whether a rank has two chunks of each sequence, see `token_order`, and not T / cp neighbouring tokens."""

    def keep(self, local: Tensor) -> None:
        """Keeps the rotary embeddings of this rank's tokens only, for ranks with two chunks of each sequence.

        Args:
            local: (T / cp,) int64, places of these tokens on the device.
        """
        assert self.cos is not None and self.sin is not None
        self.zigzag, self.cos, self.sin = True, self.cos[local], self.sin[local]

    @cached_property
    def angles(self) -> Tensor:
        """Rotary angles of each position of the longest sequence: (longest, rotary width / 2) float32."""
        assert self.inverse_frequencies is not None
        return (
            torch.arange(self.max_seqlen_q, device=self.inverse_frequencies.device)[:, None] * self.inverse_frequencies
        )

    @cached_property
    def angles_of_halves(self) -> Tensor:
        """`angles` of the elements of a head whose rotary pairs are one half apart: (longest, 1, 1, rotary width)."""
        return self.angles.repeat(1, 2)[:, None, None, :]

    @cached_property
    def angles_of_neighbours(self) -> Tensor:
        """`angles` of the elements of a head whose rotary pairs are neighbours: (longest, 1, 1, rotary width)."""
        return self.angles.repeat_interleave(2, dim=1)[:, None, None, :]

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """(number of sequences, length) of neighbouring sequences of equal length.

        Without a kernel for ragged sequences these are computed together, so that nothing is padded or copied.
        """
        assert self.lengths is not None
        lengths, counts = self.lengths.unique_consecutive(return_counts=True)
        return list(zip(counts.tolist(), lengths.tolist(), strict=True))


def describe_sequences(lengths: Tensor, inverse_frequencies: Tensor, attention_scaling: float) -> PackedSequences:
    """Describes packed sequences, on the device of `inverse_frequencies`.

    Args:
        lengths: (n,) int64 on the CPU, tokens of each sequence.
        inverse_frequencies: (rotary width / 2,) float32, as `transformers` computes them.
        attention_scaling: factor of cosines and sines, as `transformers` computes it.
    """
    device = inverse_frequencies.device
    ends = lengths.cumsum(0)
    total, longest = int(ends[-1]), int(lengths.max())
    starts = ends - lengths
    positions = torch.arange(total) - torch.repeat_interleave(starts, lengths)
    angles = copy_to(device, positions.float())[:, None] * inverse_frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    cumulative = copy_to(device, F.pad(ends, (1, 0)).int())
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cos=angles.cos() * attention_scaling,
        sin=angles.sin() * attention_scaling,
        inverse_frequencies=inverse_frequencies,
        attention_scaling=attention_scaling,
        lengths=lengths,
    )


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
    variable-length kernel where it exists (CUDA, half precision) and no softcap is set, otherwise scaled-dot-product
    attention once for each length that occurs, and plain matrix products with a softcap.
    """

    interleaved = False
    """Whether rotary pairs are neighbouring elements of a head, see `LatentConfig`, and not one half apart."""

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        window: int | None = None,
        softcap: float | None = None,
        **__: Any,
    ) -> None:
        """Creates the module, which has no parameters.

        Args:
            config: megatron-core's configuration.
            window: number of tokens that a token attends to at most, itself included; None for all.
            softcap: bound c of attention scores z, as c * tanh(z / c) (Gemma 2, arXiv:2408.00118); None for none.
        """
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
        if has_ragged_kernel(query.device, query.dtype) and self.softcap is None:
            context = self._with_ragged_kernel(query, key, value, packed)
        else:
            context = self._length_by_length(query, key, value, packed)
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
        assert packed.lengths is not None and packed.cp_group is not None
        return attend_to_gathered(self._attend_where, query, key, value, packed.lengths, self.window, packed.cp_group)

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
            (T, heads, d); with `interleaved` the even elements before the odd ones.
        """
        assert packed.cos is not None and packed.sin is not None
        if self.interleaved:
            # Queries and keys are permuted in the same way, which leaves their products unchanged.
            x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
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
        if width < query.shape[2]:
            value = F.pad(value, (0, query.shape[2] - width))  # the kernel takes one width for all three
        cumulative, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        context = varlen_attn(query, key, value, cumulative, cumulative, longest, longest, **options)
        assert isinstance(context, Tensor)
        return context[..., :width]

    def _length_by_length(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        sizes = [count * length for count, length in packed.runs]
        outputs = []
        parts = (part.split(sizes) for part in (query, key, value))
        for (count, _), *heads in zip(packed.runs, *parts, strict=True):
            q, k, v = (part.unflatten(0, (count, -1)).transpose(1, 2) for part in heads)  # (count, heads, length, d)
            outputs.append(self._attend(q, k, v).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends over sequences of equal length.

        Args:
            query: (n, heads, L, d).
            key: (n, kv_heads, L, d).
            value: (n, kv_heads, L, d_v).

        Returns:
            (n, heads, L, d_v).
        """
        length = query.shape[2]
        unbounded = self.window is None or self.window >= length
        if self.softcap is None and unbounded:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=True)
        visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        if self.window is not None:
            visible = visible.triu(1 - self.window)
        return self._attend_where(query, key, value, visible)

    def _attend_where(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        """Attends from L queries to the visible ones of K keys, (L, K) bool, of each of n sequences."""
        if self.softcap is None:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=visible, scale=self.scale, enable_gqa=True
            )
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        scores = self.softcap * torch.tanh(query @ key.mT * (self.scale / self.softcap))
        return scores.masked_fill(~visible, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies a rotary position embedding in the half-split form of Llama (arXiv:2104.09864), in float32.

    Args:
        x: (T, heads, d).
        cos: (T, 1, d) float32.
        sin: (T, 1, d) float32; both halves are equal.

    Returns:
        (T, heads, d) in the dtype of `x`.
    """
    rotated: Tensor = _Rotation.apply(x, cos, sin)
    return rotated


class _Rotation(torch.autograd.Function):
    """Rotation of the two halves of a head; its inverse is its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1.0), None, None


@fused
def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    half = x.shape[-1] // 2
    wide = x.float()
    rotated = wide * cos
    rotated[..., :half].addcmul_(wide[..., half:], sin[..., :half], value=-direction)
    rotated[..., half:].addcmul_(wide[..., :half], sin[..., half:], value=direction)
    return rotated.to(x.dtype)


class MultiLatentAttention(MLASelfAttention):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), with megatron-core's projections.

    Keys and values are computed from one narrow vector for each token, the latent; one rotary key serves all heads.
    On a tensor-parallel rank:

        (T / tp, h) -> down projection, sharded by rows -> gathered (T, rank) -> local tokens (T / tp, rank) -> norm
                    -> up projection, sharded by heads -> (T, heads / tp, ...)

    Rotary embeddings are left to `PackedMLA`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.kv_layernorm.eps = LATENT_NORM_EPS
        if self.config.q_lora_rank is not None:
            self.q_layernorm.eps = LATENT_NORM_EPS

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Projects hidden states to the inputs of `PackedMLA`.

        Args:
            hidden_states: (T / tp, 1, h).
            _: not read.
            __: not read.

        Returns:
            Query (T, heads, nope + rope); rotary key (T, 1, rope); keys and values (T, heads, nope + v); the latents
            of queries and of keys.
        """
        q_latent, kv_latent, rotary_key = self.latents(hidden_states)
        to_query = self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj

        def project(q_latent: Tensor, kv_latent: Tensor) -> tuple[Tensor, Tensor]:
            return to_query(q_latent)[0], self.linear_kv_up_proj(kv_latent)[0]

        if self.recompute_up_proj:
            # megatron-core's forward pass frees the results after attention.
            self.qkv_up_checkpoint = CheckpointWithoutOutput(fp8=self.config.fp8 or self.config.fp4)
            query, kv = self.qkv_up_checkpoint.checkpoint(project, q_latent, kv_latent)
        else:
            query, kv = project(q_latent, kv_latent)
        heads = self.num_attention_heads_per_partition
        return (
            query.unflatten(-1, (heads, -1)).squeeze(1),
            rotary_key,
            kv.unflatten(-1, (heads, -1)).squeeze(1),
            q_latent,
            kv_latent,
        )

    def latents(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects hidden states to latents.

        Args:
            hidden_states: (T / tp, 1, h).

        Returns:
            Latents of queries (the hidden states, where the model has none) and of keys, (T / tp, 1, rank), as input of
            the up projections; rotary keys (T, 1, rope).
        """
        c = self.config
        q_latent = hidden_states
        if c.q_lora_rank is not None:
            q_latent = self.q_layernorm(self._local_tokens(self._full_rows(self.linear_q_down_proj, hidden_states)))
        kv_and_rotary = self._full_rows(self.linear_kv_down_proj, hidden_states)
        kv_latent, rotary_key = kv_and_rotary.split([c.kv_lora_rank, c.qk_pos_emb_head_dim], dim=-1)
        kv_latent = self.kv_layernorm(self._local_tokens(kv_latent))
        # Each rank has the gradient from its heads only; this sums them in the backward pass.
        return q_latent, kv_latent, copy_to_tensor_model_parallel_region(rotary_key, group=self.pg_collection.tp)

    def _full_rows(self, down_projection: Any, hidden_states: Tensor) -> Tensor:
        """Projects (T / tp, 1, h) to (T, 1, rank), the same on every tensor-parallel rank."""
        part, _ = down_projection(hidden_states)
        full: Tensor = gather_from_tensor_model_parallel_region(part, group=self.pg_collection.tp)
        return full

    def _local_tokens(self, x: Tensor) -> Tensor:
        """Selects this tensor-parallel rank's tokens: (T, 1, rank) -> (T / tp, 1, rank)."""
        local: Tensor = scatter_to_sequence_parallel_region(x, group=self.pg_collection.tp)
        return local


class PackedMLA(PackedAttention):
    """Packed attention whose queries and keys have a part without positions and a rotary part."""

    def __init__(self, *arguments: Any, interleaved: bool, **options: Any) -> None:
        """Creates the module; `interleaved`: whether rotary pairs are neighbouring elements, see `LatentConfig`."""
        super().__init__(*arguments, **options)
        self.interleaved = interleaved

    def with_positions(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Builds queries and keys from the projections of `MultiLatentAttention`.

        Returns:
            Query and key (T, heads, nope + rope), value (T, heads, v).
        """
        nope = self.config.qk_head_dim
        key_nope, value = value.split([nope, self.config.v_head_dim], dim=-1)
        rotary_key = self.rotated(key, packed).expand(-1, query.shape[1], -1)
        query = torch.cat([query[..., :nope], self.rotated(query[..., nope:], packed)], dim=-1)
        return query, torch.cat([key_nope, rotary_key], dim=-1), value
