"""Description of the packed sequences of a micro-batch, which the attention of every layer reads.

Shapes as in `attention`; K is the number of keys of all sequences. A sequence whose first tokens another one computes
has queries only for the tokens after them, and keys for all, which are gathered from where they are computed:

    row 0: a b c d    row 1: a b x y        T = 6: a b c d x y          positions  0 1 2 3 2 3
    queries of row 1: x y                   K = 8: a b c d a b x y      `keys`     0 1 2 3 0 1 4 5
    lengths 4 2, key_lengths 4 4            cu_seqlens_q 0 4 6, cu_seqlens_kv 0 4 8

Keys are copied, and not read in place by a block mask of the tree of rows, which FlashAttention-3 does not have. The
copies cost in attention what whole rows cost; all other layers see a shared token once.

Context-parallel ranks that exchange keys and values have two chunks of each sequence.
A rank attends from its tokens to the keys and values of all ranks; see `token_order` for the chunks. With cp2 and 8
tokens the gathered ones are 0 1 6 7 2 3 4 5, and `gathered_order` is 0 1 4 5 6 7 2 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from verl_mg.device import copy_to
from verl_mg.megatron.balance_losses import RowsOfTokens
from verl_mg.megatron.delta_rule import Chunks
from verl_mg.megatron.multi_token import NextTokens
from verl_mg.training.microbatch import positions_of, zigzag_tokens
from verl_mg.training.packed_attention import Sequences
from verl_mg.training.selected_keys import PrescribedKeys

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(query (n, heads, L / cp, d), key (n, kv_heads, L, d), value (n, kv_heads, L, d_v), visible (L / cp, L) bool) ->
(n, heads, L / cp, d_v)."""


def gather_tokens(part: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers (T / cp, heads, d) to (T, heads, d), sequence by sequence; the backward pass sums gradients."""
    return gather_from_sequence_parallel_region(part.contiguous(), group=group)[order]


def attend_to_gathered(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    window: int | None,
    cp: int,
    rank: int,
) -> Tensor:
    """Computes causal attention of this rank's tokens (T / cp, heads, d) to all keys (T, kv_heads, d).

    Queries and keys have their rotary embedding; `lengths` are multiples of 2 * cp.
    """
    # Sequences of equal length share a mask, and are one call.
    starts, outputs, computed = lengths.cumsum(0) - lengths, [], []
    for length in lengths.unique().tolist():
        begins = starts[lengths == length][:, None]
        local, whole = begins // cp + torch.arange(length // cp), begins + torch.arange(length)
        distance = zigzag_tokens(torch.tensor([length]), cp, rank)[:, None] - torch.arange(length)
        visible = (distance >= 0) & (distance < (window or length))
        q, k, v = (
            part[copy_to(query.device, tokens)].transpose(1, 2)
            for part, tokens in ((query, local), (key, whole), (value, whole))
        )
        outputs.append(attend(q, k, v, copy_to(query.device, visible)).transpose(1, 2).flatten(0, 1))
        computed.append(local.flatten())
    return torch.cat(outputs)[copy_to(query.device, torch.cat(computed).argsort())]


@dataclass
class PackedSequences(Sequences, PackedSeqParams):
    """Description of packed sequences, computed once for a micro-batch and read by the attention of every layer.

    megatron-core passes its `PackedSeqParams` through all modules, and with it what ours need.
    """

    cos: Tensor | None = None
    """(T, 1, rotary width) float32, cosines of the rotary embedding at each token's position in its sequence; with
    `zigzag` of this rank's tokens only."""
    sin: Tensor | None = None
    """(T, 1, rotary width) float32, sines of the rotary embedding; with `zigzag` of this rank's tokens only."""
    inverse_frequencies: Tensor | None = None
    """(rotary width / 2,) float32, frequencies of the rotary embedding."""
    attention_scaling: float = 1.0
    """Factor of cosines and sines of the rotary embedding, which `cos` and `sin` contain."""
    # Required, but the fields of `PackedSeqParams` before it have defaults.
    lengths: Tensor = field(kw_only=True)
    """(n,) int64 on the CPU, tokens of each sequence that are computed for it."""
    key_lengths: Tensor = field(kw_only=True)
    """(n,) int64 on the CPU, tokens of each sequence, those included that another one computes."""
    keys: Tensor | None = None
    """(K,) int64 on the device, index of each key among the T tokens; None where K = T and the keys are in order."""
    experts: Mapping[int, Tensor] | None = None
    """(T / (cp * tp), k) int16 of each layer, prescribed experts of this rank's tokens, see `routing`."""
    prescribed_keys: PrescribedKeys | None = None  # keys of this rank's tokens, see `sparse_attention`
    occurrences: Tensor | None = None
    """(T / (cp * tp),) int64, number of rows that contain each of this rank's tokens; 0 for padding."""
    rows_of_tokens: RowsOfTokens | None = None  # rows of this rank's tokens; None without a balance loss
    next_tokens: NextTokens | None = None  # inputs of multi-token prediction; None where it is not trained
    cp_group: dist.ProcessGroup | None = None  # ranks that share the micro-batch
    zigzag: bool = False
    """Whether a rank has two chunks of each sequence, see `token_order`, and not T / cp neighbouring tokens."""
    selected: dict[int, Tensor] = field(default_factory=dict)
    """(T, bytes) uint8, keys that the tokens attend to, by the index of the layer that selected them, see
    `selected_bits`; empty where they attend to all. A recomputed layer reads it again."""

    def keep(self, local: Tensor) -> None:
        """Keeps only the rotary embeddings of this rank's tokens (T / cp,), two chunks of each sequence."""
        assert self.cos is not None and self.sin is not None
        self.zigzag, self.cos, self.sin = True, self.cos[local], self.sin[local]

    @cached_property
    def angles(self) -> Tensor:
        """Rotary angles of each position of the longest sequence: (longest, rotary width / 2) float32."""
        frequencies = self.inverse_frequencies
        assert frequencies is not None
        return torch.arange(self.max_seqlen_q, device=frequencies.device)[:, None] * frequencies

    @cached_property
    def angles_of_halves(self) -> Tensor:
        """`angles` of the elements of a head whose rotary pairs are one half apart: (longest, 1, 1, rotary width)."""
        return self.angles.repeat(1, 2)[:, None, None, :]

    def query_places(self) -> Tensor | None:
        """Returns the index of each of this rank's queries among all keys, see `packed_attention`."""
        if self.keys is not None:
            return self._places_among_keys()
        if not self.zigzag or self.cp_group is None:
            return None
        return zigzag_tokens(self.lengths, self.cp_group.size(), self.cp_group.rank())

    @cached_property
    def gathered_order(self) -> Tensor:
        """Index of each token in the tokens of all context-parallel ranks, with `zigzag`: (T,) int64."""
        assert self.cos is not None and self.cp_group is not None
        cp = self.cp_group.size()
        order = torch.cat([zigzag_tokens(self.lengths, cp, index) for index in range(cp)]).argsort()
        return copy_to(self.cos.device, order)

    @cached_property
    def chunks(self) -> Chunks:
        """Chunks of the sequences with all their keys, for linear attention."""
        assert self.cos is not None
        return Chunks.of(self.key_lengths, self.cos.device)

    @cached_property
    def places_among_keys(self) -> Tensor:
        """Index of each of the T tokens among the K keys of their sequences, ascending: (T,) int64 on the device."""
        assert self.cos is not None
        return copy_to(self.cos.device, self._places_among_keys())

    def _places_among_keys(self) -> Tensor:
        """Returns the indices of the T tokens among the K keys of their sequences, ascending, on the CPU."""
        behind = self.key_lengths.cumsum(0) - self.lengths.cumsum(0)
        return torch.arange(int(self.lengths.sum())) + torch.repeat_interleave(behind, self.lengths)


def describe_sequences(
    lengths: Tensor,
    inverse_frequencies: Tensor,
    attention_scaling: float,
    key_lengths: Tensor | None = None,
    keys: Tensor | None = None,
) -> PackedSequences:
    """Describes packed sequences, on the device of `inverse_frequencies`; all other arguments are on the CPU.

    `key_lengths` (n,) and `keys` (K,) int64: keys of each sequence, and their places among the tokens; None where each
    sequence has the keys of its tokens.
    """
    device = inverse_frequencies.device
    key_lengths = lengths if key_lengths is None else key_lengths
    ends, key_ends = lengths.cumsum(0), key_lengths.cumsum(0)
    behind = key_lengths - lengths  # tokens in front of those that are computed
    positions = positions_of(lengths) + torch.repeat_interleave(behind, lengths)
    # In float32: bfloat16 could not represent the positions.
    angles = copy_to(device, positions.float())[:, None] * inverse_frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    cumulative = copy_to(device, F.pad(ends, (1, 0)).int())
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative if keys is None else copy_to(device, F.pad(key_ends, (1, 0)).int()),
        max_seqlen_q=int(lengths.max()),
        max_seqlen_kv=int(key_lengths.max()),
        cos=angles.cos() * attention_scaling,
        sin=angles.sin() * attention_scaling,
        inverse_frequencies=inverse_frequencies,
        attention_scaling=attention_scaling,
        lengths=lengths,
        key_lengths=key_lengths,
        keys=None if keys is None else copy_to(device, keys),
    )
