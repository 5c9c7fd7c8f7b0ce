"""What the roles share: a network that judges the tokens of a batch, wherever its rows lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.config import LoraConfig
from verl_mg.layout.dynamic_cp import MicroBatchPlan, plan_by_length, plan_evenly
from verl_mg.megatron.model_runner import ModelRunner
from verl_mg.megatron.offload import CpuOffload
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.flops import row_flops
from verl_mg.roles.context import JobContext
from verl_mg.roles.row_dispatch import RowIndex, build_row_index, gather_rows, scatter_column
from verl_mg.sharding.weight_table import Head

FORWARD_COLUMNS = ("tokens", "loss_mask", "sample_id", "routed_experts")
"""The columns of which a forward pass is a function."""


class Role:
    """A network under its own layout and groups.

    All ranks of the job call its methods together; those outside the placement hold rows, and compute nothing. What a
    method answers is computed when it is looked at, see `RoleExecutor`. context: the job's, which all roles share.
    """

    head: ClassVar[Head] = "language"
    behind: ClassVar[int] = 1
    """How far before a token the hidden state lies that judges it."""

    def __init__(
        self,
        model_dir: Path,
        groups: ParallelGroups,
        context: JobContext,
        *,
        dtype: torch.dtype,
        temperature: float,
        tokens_per_micro_batch: int,
        recompute: bool = False,
        lora: LoraConfig | None = None,
        name: str = "actor",
    ) -> None:
        self.model_dir, self.name = model_dir, name
        self.runner = ModelRunner(model_dir, groups, dtype, recompute, self.head, self.behind, lora, context.timer)
        self._temperature, self._budget = temperature, tokens_per_micro_batch
        self._flops = row_flops(self.runner.table)
        self._context = context
        self.cpu_offload = CpuOffload(self.runner)

    def forward(self, batch: Batch, call: str = "forward", of: Tensor | None = None) -> Tensor:
        """What the network says of every token under the loss mask, a float32 token column with 0 elsewhere.

        of: (sum(lengths),) bool, the entries to return in place of the whole column.
        """
        self._context.offload.release_engines()
        with self._context.timer("rows"):
            rows = batch.select_columns(FORWARD_COLUMNS)
            index = build_row_index(rows)
            shares = self.share(index, index.units)
            micro_batches = self.fetch(rows, index, shares)

        def deliver(answers: dict[int, Tensor]) -> Tensor:
            column = scatter_column("what was judged", rows, index, self._speakers(shares), answers)
            return column if of is None else column[of]

        entries = rows.total_tokens if of is None else int(of.sum())
        return self._context.executor.column(
            f"{self.name}.{call}", entries, partial(self._answers, shares, micro_batches), deliver
        )

    def _answers(self, shares: MicroBatchPlan, micro_batches: list[Batch]) -> dict[int, Tensor]:
        """The judged rows that this rank speaks for, by their numbers in the index."""
        self._context.offload.load_exclusively(self.cpu_offload, training=False)
        answers: dict[int, Tensor] = {}
        judged = self.runner.judge(micro_batches, self._temperature, shares.cp_sizes)
        own = self._rows_of(dist.get_rank(), shares)
        for numbers, micro, told in zip(own, micro_batches, judged, strict=bool(judged)):
            if told is not None:
                column = torch.zeros(micro.total_tokens)
                column[told[0]] = told[1]
                answers |= dict(zip(numbers, column.split(micro.lengths.tolist()), strict=True))
        return answers

    def _speakers(self, shares: MicroBatchPlan) -> list[tuple[int, list[int]]]:
        """Which ranks answer for which rows."""
        return [
            (
                self.runner.output_rank(seat),
                [row for step, micro in enumerate(steps) if shares.is_output_rank(seat, step) for row in micro],
            )
            for seat, steps in enumerate(shares.rows)
        ]

    def share(self, index: RowIndex, units: Sequence[Sequence[int]]) -> MicroBatchPlan:
        """Pack the rows of the given units into micro-batches and deal them to the ranks that work side by side."""
        rows = [[index.lengths[row] for row in unit] for unit in units]
        costs = [sum(map(self._flops, lengths)) for lengths in rows]
        deal = plan_by_length if self.runner.groups.dynamic_cp else plan_evenly
        layout = self.runner.layout
        shares = deal([sum(lengths) for lengths in rows], costs, layout.dp, layout.cp, self._budget)
        dealt = [[[row for i in micro for row in units[i]] for micro in steps] for steps in shares.rows]
        return MicroBatchPlan(dealt, shares.cp_sizes)

    def fetch(self, batch: Batch, index: RowIndex, shares: MicroBatchPlan) -> list[Batch]:
        """This rank's micro-batches."""
        ranks = range(dist.get_world_size())
        wanted = [[row for micro in self._rows_of(rank, shares) for row in micro] for rank in ranks]
        rows = gather_rows(batch, index, wanted)
        return rows.split([len(micro) for micro in self._rows_of(dist.get_rank(), shares)])

    def _rows_of(self, rank: int, shares: MicroBatchPlan) -> list[list[int]]:
        """The rows of the micro-batches of a rank of the job."""
        at = self.runner.placement.coordinates(rank)
        return shares.rows[at.dp * self.runner.layout.cp + at.cp] if at else []
