"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): projections, queries, keys and values.

Shapes as in `attention`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from torch import Tensor

from verl_mg.megatron.attention import PackedAttention, join_rotated, rotate_end
from verl_mg.megatron.core_version import MLASelfAttention
from verl_mg.megatron.packed_sequences import PackedSequences

LATENT_NORM_EPS = 1e-6  # epsilon of the norms of latents: the checkpoints' modules use it whatever rms_norm_eps is


class MultiLatentAttention(MLASelfAttention):
    """Multi-head latent attention with megatron-core's projections.

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
        """Projects hidden states (T / tp, 1, h) to the inputs of `PackedMLA`.

        Query (T, heads, nope + rope), rotary key (T, 1, rope), keys and values (T, heads, nope + v); then both latents.
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
        """Projects hidden states to latents of queries and keys (T / tp, 1, rank), and rotary keys (T, 1, rope).

        Without `q_lora_rank` the hidden states themselves are the input of the projection to queries.
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
        return gather_from_tensor_model_parallel_region(part, group=self.pg_collection.tp)

    def _local_tokens(self, x: Tensor) -> Tensor:
        """Selects this tensor-parallel rank's tokens: (T, 1, rank) -> (T / tp, 1, rank)."""
        return scatter_to_sequence_parallel_region(x, group=self.pg_collection.tp)


class PackedMLA(PackedAttention):
    """Packed attention whose queries and keys have a part without positions and a rotary part, see `LatentConfig`."""

    kind = "latent attention"

    def __init__(self, *arguments: Any, interleaved: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.interleaved = interleaved

    def with_positions(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Builds queries, keys (T, heads, nope + rope) and values from the projections of `MultiLatentAttention`.

        `key` is the rotary part (T, 1, rope), `value` the rest of the keys and the values (T, heads, nope + v).
        """
        assert packed.cos is not None and packed.sin is not None
        key_nope, value = value.split([self.config.qk_head_dim, self.config.v_head_dim], dim=-1)
        # Queries and keys are permuted alike, which leaves their products as they are.
        query = rotate_end(query, packed.cos, packed.sin, self.interleaved)
        return query, join_rotated(key_nope, key, packed.cos, packed.sin, self.interleaved), value
