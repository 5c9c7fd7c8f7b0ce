"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) over packed sequences.

Keys and values are made of one narrow vector a token, the latent; beside it stands one rotary key for all heads.
Of T tokens on a tensor-parallel rank, whose part of the tokens is T / tp outside the projections:

    (T / tp, h) -> down projection, cut by rows -> gathered (T, rank) -> own tokens (T / tp, rank) -> norm
                -> up projection, cut by heads -> (T, heads / tp, ...)
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from verl_mg.megatron.attention import PackedAttention, rotate

# The norms of what is compressed have it in the checkpoints' own modules, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


class MultiLatentAttention(MLASelfAttention):
    """megatron-core's projections; rotary embeddings are left to `PackedMLA`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.kv_layernorm.eps = LATENT_NORM_EPS
        if self.config.q_lora_rank is not None:
            self.q_layernorm.eps = LATENT_NORM_EPS

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Hidden states (T / tp, 1, h) -> what `PackedMLA` takes, and the latents of queries and of keys.

        query (T, heads, nope + rope); rotary key (T, 1, rope); keys and values (T, heads, nope + v).
        """
        c = self.config
        q_latent = hidden_states
        if c.q_lora_rank is not None:
            q_latent = self.q_layernorm(self._own_tokens(self._whole_rows(self.linear_q_down_proj, hidden_states)))
        together = self._whole_rows(self.linear_kv_down_proj, hidden_states)
        kv_latent, rotary_key = together.split([c.kv_lora_rank, c.qk_pos_emb_head_dim], dim=-1)
        kv_latent = self.kv_layernorm(self._own_tokens(kv_latent))
        # Each rank has the gradient of its own heads alone.
        rotary_key = copy_to_tensor_model_parallel_region(rotary_key, group=self.pg_collection.tp)
        to_query = self.linear_q_proj if c.q_lora_rank is None else self.linear_q_up_proj
        query, kv = to_query(q_latent)[0], self.linear_kv_up_proj(kv_latent)[0]
        heads = self.num_attention_heads_per_partition
        return (
            query.unflatten(-1, (heads, -1)).squeeze(1),
            rotary_key,
            kv.unflatten(-1, (heads, -1)).squeeze(1),
            q_latent,
            kv_latent,
        )

    def _whole_rows(self, down_projection: Any, hidden_states: Tensor) -> Tensor:
        """(T / tp, 1, h) -> (T, 1, rank), the same on every tensor-parallel rank."""
        part, _ = down_projection(hidden_states)
        whole: Tensor = gather_from_tensor_model_parallel_region(part, group=self.pg_collection.tp)
        return whole

    def _own_tokens(self, x: Tensor) -> Tensor:
        """(T, 1, rank) -> (T / tp, 1, rank)."""
        own: Tensor = scatter_to_sequence_parallel_region(x, group=self.pg_collection.tp)
        return own


class PackedMLA(PackedAttention):
    """Packed attention whose queries and keys have a part without positions and a rotary one.

    interleaved: see `LatentConfig`.
    """

    def __init__(self, *arguments: Any, interleaved: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._interleaved = interleaved

    def with_positions(
        self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `MultiLatentAttention` makes, of all tokens -> query, key (T, heads, nope + rope), value (T, heads,
        v)."""
        nope = self.config.qk_head_dim
        key_nope, value = value.split([nope, self.config.v_head_dim], dim=-1)
        rotary_key = self._rotated(key, cos, sin).expand(-1, query.shape[1], -1)
        query = torch.cat([query[..., :nope], self._rotated(query[..., nope:], cos, sin)], dim=-1)
        return query, torch.cat([key_nope, rotary_key], dim=-1), value

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # Queries and keys are put in another order alike, which their products do not see.
        if self._interleaved:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
        return rotate(x, cos, sin)
