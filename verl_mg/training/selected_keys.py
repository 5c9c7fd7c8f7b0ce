"""Columns of the keys that the rollout attended to, to which training attends too (replay of sparse attention).

batch["selection_sizes"]    token column, int32: bytes of the token's selection in each layer that selects; 0: not
                            known, the indexer decides, or the token attends to all keys up to itself
batch["selected_keys"]      column counted by it, uint8, (sum(sizes), layers): bit s % 8 of byte s // 8 of a token is
                            set where it attends to key s of its row. On the ranks of a pipeline stage the column has
                            the layers of `selecting_layers` only.

A token at position 9 of a row, of a model with top_k = 3 and one indexer, that attends to the tokens 0, 4 and 9:

    selection_sizes  ... 2 ...      selected_keys  ... [0b00010001], [0b00000010] ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl_mg.batch import SELECTED_KEYS, SELECTION_SIZES, Batch, entries_of
from verl_mg.device import copy_to
from verl_mg.errors import UserError
from verl_mg.layout import Stage
from verl_mg.models.hf_config import HFConfig
from verl_mg.training.microbatch import TokenOrder, TokenShard, positions_of


def selecting_layers(config: HFConfig, stage: Stage) -> tuple[int, ...]:
    """Returns the layers of a pipeline stage that select keys, ascending; others share the selection of these."""
    return tuple(layer for layer in stage.layers if config.indexer and config.indexer.has_indexer(layer))


@dataclass(frozen=True)
class PrescribedKeys:
    """Keys that this rank's t = T / (cp * tp) tokens attend to."""

    known: Tensor  # (t,) bool; the indexer selects the keys of other tokens
    # In host memory: all micro-batches of a pass are packed before the first one is computed.
    bits: Mapping[int, Tensor]  # of each layer that selects: (t, longest / 8) uint8, see `sparse_attention`

    @classmethod
    def of(
        cls, rows: Batch, order: TokenOrder, shard: TokenShard, layers: Sequence[int], device: torch.device
    ) -> PrescribedKeys | None:
        """Selects the columns at this rank's tokens, for the layers that they have; None without the columns."""
        if SELECTED_KEYS not in rows:
            return None
        token_at = torch.full((order.total,), -1)
        token_at[order.places] = torch.arange(rows.total_tokens)
        tokens = token_at[order.local].chunk(shard.tp)[shard.tp_index]  # -1: padding, left to the indexer
        sizes = rows[SELECTION_SIZES].long()
        counts = torch.zeros_like(tokens)
        counts[tokens >= 0] = sizes[tokens[tokens >= 0]]
        entries = rows[SELECTED_KEYS][entries_of(sizes, tokens[counts > 0])]
        longest = int((order.lengths if order.key_lengths is None else order.key_lengths).max())
        bits = torch.zeros(len(layers), len(tokens), -(-longest // 8), dtype=torch.uint8)
        bits[:, torch.arange(len(tokens)).repeat_interleave(counts), positions_of(counts)] = entries.T
        return cls(copy_to(device, counts > 0), dict(zip(layers, bits, strict=True)))

    def replace(self, layer: int, selected: Tensor) -> Tensor:
        """Returns selections (t, longest / 8) of a layer with those that are prescribed in their place."""
        return torch.where(self.known[:, None], copy_to(selected.device, self.bits[layer]), selected)


def check_selected_keys(rows: Batch, config: HFConfig) -> None:
    """Checks shape and values of the columns of prescribed keys; a model without indexers ignores them."""
    if config.indexer is None or SELECTED_KEYS not in rows:
        return
    top_k, layers = config.indexer.top_k, len(config.indexer.selecting)
    given, sizes = rows[SELECTED_KEYS], rows[SELECTION_SIZES].long()
    if given.dtype is not torch.uint8 or tuple(given.shape[1:]) != (layers,):
        raise UserError(
            f"column {SELECTED_KEYS!r}: its entries are {tuple(given.shape[1:])} {given.dtype}, and the model needs "
            f"one torch.uint8 for each of its {layers} indexers. Pass the selections of this model, or leave it out."
        )
    positions = rows.positions
    known = sizes > 0
    wrong = known & ((sizes != positions // 8 + 1) | (positions < top_k))
    ends = sizes.cumsum(0)
    bits = np.bitwise_count(given.numpy())
    if not wrong.any() and len(bits):
        starts = (ends - sizes)[known].numpy()
        counts = torch.from_numpy(np.add.reduceat(bits, starts, axis=0, dtype=np.int64))
        # Of the last byte of a token, the bits after its own are of later keys.
        later = given[ends[known] - 1].long() >> (positions[known] % 8 + 1)[:, None]
        wrong[known] = ((counts != top_k) | (later > 0)).any(1)
    if wrong.any():
        token = int(wrong.nonzero()[0])
        raise UserError(
            f"column {SELECTED_KEYS!r}: token {int(positions[token])} of row {int(rows.sequence_ids[token])} does not "
            f"have exactly {top_k} keys up to itself in each layer, as tokens from the position {top_k} on do. Write 0 "
            f"in {SELECTION_SIZES!r} where the selection is not known."
        )
