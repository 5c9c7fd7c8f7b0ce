"""Shared prefixes of the rows of a batch (columns `prefix_of`, `prefix_length`): where training computes them once."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from verl_mg.batch import Batch, ColumnKind
from verl_mg.distributed.collectives import all_gather_bytes
from verl_mg.layout.shared_prefixes import PrefixLinks, Shared
from verl_mg.rows.index import RowIndex
from verl_mg.training.microbatch import ROUTED_EXPERTS, SHARED_TOKENS, SHARED_WITH
from verl_mg.training.runner import Runner

PREFIX_COLUMNS = ("prefix_of", "prefix_length")


def can_share_prefixes(runner: Runner, columns: Container[str]) -> bool:
    """Returns whether shared prefixes are computed once; otherwise every row is computed whole."""
    # Prescribed experts may differ between rows for the same token. Context-parallel ranks that exchange keys and
    # values have two chunks of a sequence each; other context-parallel ranks may share a row in numbers that depend on
    # its length.
    if not all(name in columns for name in PREFIX_COLUMNS):
        return False
    prescribed = ROUTED_EXPERTS in columns and runner.table.config.experts is not None
    return runner.can_share_prefixes and not prescribed


def gather_links(batch: Batch, index: RowIndex) -> PrefixLinks:
    """Returns the prefixes that the rows of a batch share, by row number; all ranks call it together."""
    names = ("sample_id", *PREFIX_COLUMNS)
    rows = torch.empty(0, len(names), dtype=torch.int64)
    if len(batch):  # a rank without rows may have columns of other types
        rows = torch.stack([batch[name].long() for name in names], dim=1)
    gathered = all_gather_bytes(rows.flatten().view(torch.uint8))
    # A clone is aligned for the view as int64, which a slice of the received bytes need not be.
    everything = torch.cat([part.clone().view(torch.int64) for part in gathered]).view(-1, len(names))
    sample_ids, prefix_of, prefix_length = everything[everything[:, 0].argsort()].unbind(1)
    # The index numbers rows in the order of their sample ids.
    assert tuple(sample_ids.tolist()) == index.sample_ids
    return PrefixLinks.from_columns(index.sample_ids, index.lengths, prefix_of.tolist(), prefix_length.tolist())


def mark_shared(rows: Batch, numbers: Sequence[int], shared: Shared) -> Batch:
    """Adds the columns of rows that share their first tokens, see `microbatch`; `numbers` are those in the index."""
    # Rows 4 and 7, where `shared` has {7: (4, 10)}: SHARED_WITH is [0, 0] and SHARED_TOKENS [0, 10], so row 7 computes
    # its first 10 tokens with row 4.
    if any(number in shared for number in numbers):
        place = {number: row for row, number in enumerate(numbers)}
        sources = [shared.get(number, (number, 0)) for number in numbers]
        rows.put(SHARED_WITH, torch.tensor([place[other] for other, _ in sources]), ColumnKind.SEQUENCE)
        rows.put(SHARED_TOKENS, torch.tensor([count for _, count in sources]), ColumnKind.SEQUENCE)
    return rows
