"""Sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1): latent attention to keys that an indexer selects.

The index score of a key s for a query t is a sum over the indexer's heads h, each a product with the same key:

    score[t, s] = sum over h of weight[t, h] * relu(q[t, h] . k[s])

A query attends to the `top_k` keys of its sequence with the highest scores, and of equal ones to the first. Up to
`top_k` keys it attends to all of them: micro-batches of such rows compute no scores. The choice has no gradient, and
the indexer's weights are frozen.

Each tensor-parallel and context-parallel rank selects for its own T / (cp * tp) tokens; keys are gathered before and
selections after, as one bit for each key of the longest sequence. Scores exist for a few queries at a time. Attention
itself is computed with a mask, and takes as long as attention to all keys. Where layers share a selection (GLM-5.2), it
travels with the hidden states to the next pipeline stages, see `StageSelections`.

Replay: where a batch has the keys that the rollout attended to, training attends to the same ones, so that both compute
the same function, as routing replay does for experts. `training.selected_keys` describes the columns.

Not megatron-core's module (new in 0.19), which needs a kernel for the rotation of queries and keys, and cuts each
sequence among context-parallel ranks. The rotation is orthogonal, so scores are the same without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from verl_mg import device
from verl_mg.choice import Choice
from verl_mg.megatron.attention import rotate_end
from verl_mg.megatron.latent_attention import MultiLatentAttention, PackedMLA
from verl_mg.megatron.packed_sequences import PackedSequences
from verl_mg.models.attention_config import IndexerConfig
from verl_mg.training.flex_attention import attend_with_block_mask, block_mask
from verl_mg.training.packed_attention import BY_BLOCKS, Scores, attend_where, has_ragged_kernel

NORM_EPS = 1e-6  # epsilon of the norm of keys: the checkpoints' modules use it whatever rms_norm_eps is
SCORES = 2**27  # products of queries and keys that exist at a time, in float32: 512 MiB


class Indexer(nn.Module):
    """Selects the keys of each query; its weights are frozen and whole on every rank."""

    def __init__(self, config: TransformerConfig, indexer: IndexerConfig, q_rank: int) -> None:
        super().__init__()
        self.sizes = indexer
        options: dict[str, Any] = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.wq_b = nn.Linear(q_rank, indexer.heads * indexer.head_dim, bias=False, **options)
        self.wk = nn.Linear(config.hidden_size, indexer.head_dim, bias=False, **options)
        # float32 in the checkpoint too, whatever the dtype of the model.
        self.k_norm = nn.LayerNorm(indexer.head_dim, NORM_EPS, **options | {"dtype": torch.float32})
        self.weights_proj = nn.Linear(config.hidden_size, indexer.heads, bias=False, **options)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(
        self, layer: int, hidden: Tensor, q_latent: Tensor, packed: PackedSequences, tp: dist.ProcessGroup
    ) -> Tensor:
        """Selects the keys of the queries of all sequences: (T, longest / 8) uint8, see `selected_bits`.

        A collective of the ranks that share them; `hidden` and the normalized `q_latent` are of this rank's tokens.
        Keys that are prescribed for the layer replace its own choice.
        """
        cp = packed.cp_group
        assert cp is not None and packed.cos is not None and packed.sin is not None
        first = (cp.rank() * tp.size() + tp.rank()) * len(hidden)
        cos, sin = (part[first : first + len(hidden)] for part in (packed.cos, packed.sin))
        query = self._rotated(self.wq_b(q_latent).unflatten(-1, (self.sizes.heads, -1)), cos, sin)
        key = self._rotated(self.k_norm(self.wk(hidden).float()).to(query.dtype)[:, None], cos, sin)[:, 0]
        scale = (self.sizes.heads * self.sizes.head_dim) ** -0.5
        # Scores are float32, as in `transformers`; engines on GPUs compute them in FP8, and may choose another of two
        # keys with nearly equal scores.
        weights = F.linear(hidden.float(), self.weights_proj.weight.float()) * scale
        # The one narrow key of a token travels, then the bits of its selection, and no hidden state.
        keys = _gathered(_gathered(key, tp), cp)
        if packed.keys is not None:
            keys = keys[packed.keys]
        bits = selected_bits(query, keys, weights, packed, self.sizes.top_k, first)
        if packed.prescribed_keys is not None:
            bits = packed.prescribed_keys.replace(layer, bits)
        return _gathered(_gathered(bits, tp), cp)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates the first elements of each head, and moves them to its end, which leaves products unchanged."""
        return rotate_end(x.roll(-cos.shape[-1], dims=-1), cos, sin, self.sizes.interleaved)


def selected_bits(
    query: Tensor, key: Tensor, weights: Tensor, packed: PackedSequences, top_k: int, first: int
) -> Tensor:
    """Selects the keys with the highest scores, for the n neighbouring tokens from the index `first` on.

    In the result, (n, longest / 8) uint8, bit s % 8 of byte s // 8 is set where a token may attend to key s of its
    sequence; bits after the token itself are not read. Query (n, heads, d), keys (K, d) of all sequences.
    """
    bits = torch.full((len(query), -(-packed.max_seqlen_kv // 8)), 255, dtype=torch.uint8, device=query.device)
    ends, key_ends = packed.lengths.cumsum(0).tolist(), packed.key_lengths.cumsum(0).tolist()
    for length, end, keys, key_end in zip(
        packed.lengths.tolist(), ends, packed.key_lengths.tolist(), key_ends, strict=True
    ):
        # A token at position p of its sequence has p + 1 keys, and attends to all of them up to position top_k - 1.
        behind = end - keys  # index of the token at position 0, were it among these tokens
        begin = max(end - length, behind + top_k, first)
        stop = min(end, first + len(query))
        step = max(1, SCORES // (query.shape[1] * keys))
        for start in range(begin, stop, step):
            tokens = slice(start - first, min(start + step, stop) - first)
            last = tokens.stop + first - behind  # keys of the last of these tokens
            seen = key[key_end - keys : key_end - keys + last]
            scores = _index_scores(query[tokens], seen, weights[tokens])
            positions = torch.arange(last - len(scores), last, device=query.device)
            later = torch.arange(last, device=query.device) > positions[:, None]
            chosen = _packed_bits(_largest(scores.masked_fill_(later, -torch.inf), top_k))
            bits[tokens, : chosen.shape[1]] = chosen
    return bits


def _index_scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Computes scores: (n, heads, d), (K, d), (n, heads) -> (n, K) float32."""
    products = (query.flatten(0, 1).float() @ key.float().T).relu_().unflatten(0, query.shape[:2])
    return (weights[:, None] @ products).squeeze(1)


def _largest(scores: Tensor, count: int) -> Tensor:
    """Returns which `count` scores of each row are the largest, of equal ones the first: (n, K) -> (n, K) bool."""
    # Which of equal scores `topk` returns is not defined; the first ones are the same on any device and layout.
    least = scores.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = scores > least, scores == least
    return above | (equal & (equal.cumsum(1) <= count - above.sum(1, keepdim=True)))


def _packed_bits(chosen: Tensor) -> Tensor:
    """Packs eight columns into a byte, the first one as the lowest bit: (n, K) bool -> (n, K / 8) uint8."""
    padded = F.pad(chosen, (0, -chosen.shape[1] % 8)).unflatten(1, (-1, 8))
    return (padded * (1 << torch.arange(8, dtype=torch.uint8, device=chosen.device))).sum(-1, dtype=torch.uint8)


def _unpacked_bits(bits: Tensor, count: int) -> Tensor:
    """Returns the first `count` bits of each row: (n, bytes) uint8 -> (n, count) bool."""
    each = bits[..., None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1
    return each.flatten(1)[:, :count].bool()


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the rows of all ranks of a group, in their order."""
    if group.size() == 1:
        return part
    whole = part.new_empty(group.size() * len(part), *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


@dataclass(frozen=True)
class StageSelections:
    """Selections that cross the bounds of a pipeline chunk with the hidden states of its tokens.

    The bits of a token's selection follow its hidden state as more elements of the same type:

        (t, 1, h) hidden states, (t, bytes) bits   ->   (t, 1, h + bytes / element size)
    """

    top_k: int
    received: int | None = None  # layer on an earlier chunk whose selection the first layer shares
    sent: int | None = None  # layer, here or on an earlier chunk, whose selection the next chunk's first layer shares

    @classmethod
    def of_layers(cls, indexer: IndexerConfig, layers: range) -> StageSelections:
        """Returns the selections that the chunk with neighbouring layers receives and sends."""
        return cls(indexer.top_k, indexer.shared(layers.start), indexer.shared(layers.stop))

    def take(self, received: Tensor, hidden_size: int, packed: PackedSequences, tp: dist.ProcessGroup) -> Tensor:
        """Leaves a received selection in the description of the sequences, and returns the hidden states (t, 1, h)."""
        if self.received is None or packed.max_seqlen_kv <= self.top_k:
            return received
        hidden, behind = received.tensor_split([hidden_size], dim=-1)
        bits = behind.detach().squeeze(1).contiguous().view(torch.uint8)[:, : -(-packed.max_seqlen_kv // 8)]
        assert packed.cp_group is not None
        packed.selected[self.received] = _gathered(_gathered(bits, tp), packed.cp_group)
        return hidden

    def give(self, hidden: Tensor, packed: PackedSequences, tp: dist.ProcessGroup) -> Tensor:
        """Appends the selection of this rank's tokens to their hidden states (t, 1, h), where one is sent."""
        if self.sent is None or packed.max_seqlen_kv <= self.top_k:
            return hidden
        assert packed.cp_group is not None
        first = (packed.cp_group.rank() * tp.size() + tp.rank()) * len(hidden)
        bits = packed.selected[self.sent][first : first + len(hidden)]
        whole = F.pad(bits, (0, -bits.shape[1] % hidden.element_size()))
        return torch.cat([hidden, whole.view(hidden.dtype)[:, None]], dim=-1)


class SparseLatentAttention(MultiLatentAttention):
    """Multi-head latent attention whose indexer leaves its selection in the description of the sequences.

    A layer without an indexer attends to the keys that an earlier one selected, whose selection is there already.
    """

    def __init__(self, *arguments: Any, indexer: IndexerConfig, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.layer = self.layer_number - 1
        self.indexer = None
        if indexer.has_indexer(self.layer):
            self.indexer = Indexer(self.config, indexer, self.config.q_lora_rank)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Projects hidden states to the inputs of `PackedSparseMLA`, see `MultiLatentAttention`, and selects keys."""
        projected = super().get_query_key_value_tensors(hidden_states)
        packed, q_latent = packed_seq_params, projected[3]
        assert packed is not None
        if self.indexer and packed.max_seqlen_kv > self.indexer.sizes.top_k and self.layer not in packed.selected:
            # Once for a micro-batch: a recomputed layer attends to the same keys again.
            hidden, tp = hidden_states.squeeze(1), self.pg_collection.tp
            packed.selected[self.layer] = self.indexer(self.layer, hidden, q_latent.squeeze(1), packed, tp)
        return projected


class PackedSparseMLA(PackedMLA):
    """Packed latent attention to the keys that the layer `source` has selected, see `SparseLatentAttention`."""

    kind = "sparse attention"

    def __init__(self, *arguments: Any, source: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.source = source

    def chosen(self) -> Choice:
        """Returns what computes attention to selected keys, and what rows so short that all keys are selected."""
        part, of_short_rows, warning = super().chosen()
        place = device.current_device()
        by_blocks = has_ragged_kernel(place, self.config.params_dtype)
        selected = BY_BLOCKS if by_blocks else "masks of all pairs"
        return Choice(part, f"{selected} under the selected keys; short rows by {of_short_rows}", warning)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        if self.source not in packed.selected:
            return super()._attend(query, key, value, packed)
        return attend_to_selected(query, key, value, packed, packed.selected[self.source], self.scale)


def attend_to_selected(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, bits: Tensor, scale: float | None
) -> Tensor:
    """Computes causal attention of tokens (T, heads, d) to selected keys of their sequences, see `selected_bits`."""
    if has_ragged_kernel(query.device, query.dtype):
        mask = block_mask(packed.key_lengths, None, query.device, packed.query_places(), bits)
        return attend_with_block_mask(query, key, value, mask, scale)
    sizes, key_sizes = packed.lengths.tolist(), packed.key_lengths.tolist()
    parts = bits.split(sizes), query.split(sizes), key.split(key_sizes), value.split(key_sizes)
    outputs = []
    for selected, *heads in zip(*parts, strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in heads)  # (1, heads, length, d)
        visible = _unpacked_bits(selected, k.shape[2]).tril(k.shape[2] - q.shape[2])
        outputs.append(attend_where(q, k, v, visible, Scores(scale))[0].transpose(0, 1))
    return torch.cat(outputs)
