"""What the roles share: a network that judges the tokens of a batch, wherever its rows lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.config import LoraConfig
from verl_mg.megatron.groups import ParallelGroups
from verl_mg.megatron.network import Network
from verl_mg.megatron.packing import pack
from verl_mg.roles.exchange import RowIndex, fetch_rows, index_rows, return_column
from verl_mg.weights import Head

Shares = list[list[list[int]]]
"""shares[data-parallel index][micro-batch] = row numbers of a RowIndex."""


class Role:
    """A network under its own layout and groups.

    All ranks of the job call its methods together; those outside the placement hold rows, and compute nothing.
    """

    head: ClassVar[Head] = "language"
    behind: ClassVar[int] = 1
    """How far before a token the hidden state lies that judges it."""

    def __init__(
        self,
        model_dir: Path,
        groups: ParallelGroups,
        *,
        dtype: torch.dtype,
        temperature: float,
        tokens_per_micro_batch: int,
        recompute: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        self.model_dir = model_dir
        self.network = Network(model_dir, groups, dtype, recompute, self.head, self.behind, lora)
        self._temperature, self._budget = temperature, tokens_per_micro_batch
        self.claim: Callable[[], None] = lambda: None
        """Called before it computes: whoever shares the device gives its memory back."""

    def judge(self, batch: Batch) -> Tensor:
        """What the network says of every token under the loss mask, a float32 token column with 0 elsewhere."""
        self.claim()
        index = index_rows(batch)
        shares = self.share(index, index.units)
        micro_batches = self.fetch(batch, index, shares)
        answers: dict[int, Tensor] = {}
        own = self._share_of(dist.get_rank(), shares)
        judged = self.network.judge(micro_batches, self._temperature)
        for rows, micro, (entries, values) in zip(own, micro_batches, judged, strict=bool(judged)):
            column = torch.zeros(micro.total_tokens)
            column[entries] = values
            answers |= dict(zip(rows, column.split(micro.lengths.tolist()), strict=True))
        speakers = [
            (self.network.speaker(dp), [row for micro in share for row in micro]) for dp, share in enumerate(shares)
        ]
        return return_column("what was judged", batch, index, speakers, answers)

    def share(self, index: RowIndex, units: Sequence[Sequence[int]]) -> Shares:
        """Pack the rows of the given units into micro-batches and deal them to the data-parallel indices."""
        hidden, ranks = self.network.table.config.hidden, self.network.layout.dp
        packed = pack([sum(index.lengths[row] for row in unit) for unit in units], ranks, self._budget, hidden)
        return [[[row for i in micro for row in units[i]] for micro in share] for share in packed]

    def fetch(self, batch: Batch, index: RowIndex, shares: Shares) -> list[Batch]:
        """This rank's micro-batches."""
        wanted = [
            [row for micro in self._share_of(rank, shares) for row in micro] for rank in range(dist.get_world_size())
        ]
        rows = fetch_rows(batch, index, wanted)
        return rows.split([len(micro) for micro in self._share_of(dist.get_rank(), shares)])

    def _share_of(self, rank: int, shares: Shares) -> list[list[int]]:
        """The rows of the micro-batches of a rank of the job."""
        at = self.network.placement.coordinates(rank)
        return shares[at.dp] if at else []
