"""`Role`: a model on some ranks of the job, with a forward pass over a batch that is distributed over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.batch import SELECTED_KEYS, SELECTION_SIZES, SUPPORT_IDS, SUPPORT_SIZES, Batch, ColumnKind
from verl_mg.checkpoint.sharded_safetensors import StoredBox
from verl_mg.errors import UserError
from verl_mg.layout import Stage
from verl_mg.layout.packing import MicroBatchPlan, plan_by_length, plan_evenly
from verl_mg.layout.shared_prefixes import Shared, SharingRows, Unit, join_groups
from verl_mg.megatron.routing import check_routed_experts
from verl_mg.models.flops import key_share, row_flops
from verl_mg.models.hf_config import HFConfig
from verl_mg.roles.context import JobContext
from verl_mg.rows.dispatch import gather_rows, scatter_column
from verl_mg.rows.fingerprint import Fingerprint
from verl_mg.rows.plan import INDEXED_COLUMNS, ColumnPart, ColumnSchema, RowIndex
from verl_mg.sharding.model_table import Head
from verl_mg.training.logprobs import LOGPROBS, TokenOutputs
from verl_mg.training.microbatch import ROUTED_EXPERTS, SHARED_TOKENS, SHARED_WITH, TEACHER_TOP
from verl_mg.training.offload import CpuOffload
from verl_mg.training.routed_experts import replayed_layers
from verl_mg.training.runner import Runner
from verl_mg.training.selected_keys import check_selected_keys, selecting_layers

LEAST_SAVED = 0.1
"""Share of a batch's tokens for which prefixes are shared: attention over shared ones has more to start and to copy."""


def can_share_prefixes(runner: Runner, columns: Container[str]) -> bool:
    """Returns whether shared prefixes are computed once; otherwise every row is computed whole."""
    # Prescribed experts and keys may differ between rows for the same token. Context-parallel ranks that exchange keys
    # and values have two chunks of a sequence each; other context-parallel ranks may share a row in numbers that depend
    # on its length.
    config = runner.table.config
    prescribed = (ROUTED_EXPERTS in columns and config.experts) or (SELECTED_KEYS in columns and config.indexer)
    return runner.can_share_prefixes and not prescribed


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


SUPPORT_COLUMNS = (SUPPORT_SIZES, SUPPORT_IDS)
SELECTION_COLUMNS = (SELECTION_SIZES, SELECTED_KEYS)
FORWARD_COLUMNS = ("tokens", "loss_mask", "routed_experts", *SELECTION_COLUMNS, *SUPPORT_COLUMNS)
"""Columns that the result of a forward pass depends on."""


@dataclass(frozen=True)
class ForwardPass:
    """Forward pass of a model over a batch whose rows are where they are computed."""

    name: str
    """The call as written in a recipe, such as "actor.compute_logprobs"."""
    work: Callable[[], Any]
    """Computes on this rank, with the ranks of the model only."""
    deliver: Callable[[Any], Tensor]
    """Makes the token column of this rank's rows from the result of `work`, with all ranks."""


@dataclass(frozen=True)
class Batching:
    """Settings by which a role computes the rows of a batch."""

    temperature: float
    """Sampling temperature, which divides the logits; 0 is greedy sampling."""
    tokens_per_micro_batch: int
    """On all ranks of a context-parallel group together."""
    on_support: bool = True
    """Whether distributions are over the candidates of each draw, in batches that have them."""
    likeliest: str | None = None
    """Column of likeliest tokens whose log-probs are computed as well, in batches that have it; None: there is none."""

    def with_likeliest(self, outputs: TokenOutputs, batch: Batch) -> TokenOutputs:
        """Returns outputs with the log-probs of likeliest tokens: of the teacher to compare with, or of the sampler."""
        teacher = outputs.teacher
        if teacher is not None and self.likeliest in batch:
            raise UserError(
                "algorithm.off_policy.score_centering: an update by the divergence from a teacher scores no tokens "
                "that the engine found likely. Leave one of the two out."
            )
        name = TEACHER_TOP if teacher is not None and teacher.layers is None else self.likeliest
        if name is None or name not in batch:
            return outputs
        return replace(outputs, likeliest=name, num_likeliest=batch[name].shape[-1])


class Role:
    """Model with its own layout and process groups.

    All ranks of the job call its methods together; ranks outside the placement keep rows but compute nothing. In a
    `concurrent_roles` block a call returns a `PendingColumn` or `PendingMetrics`. A forward pass:

        all ranks              index the rows, plan micro-batches, send the rows to the ranks that compute them
        ranks of the role      load the weights if they were offloaded, compute the micro-batches      `work`
        all ranks              send the values to the owners of the rows                               `deliver`
    """

    head: ClassVar[Head] = "language"
    """Output layer of the model: logits over the vocabulary, or a value head."""
    keeps_multi_token: ClassVar[bool] = False
    """Whether the model has the layer of multi-token prediction of its directory, which engines and exports need."""
    hidden_offset: ClassVar[int] = 1
    """Offset from a token to the hidden state that scores it: 1 for language-model heads, 0 for reward heads."""

    def __init__(self, runner: Runner, batching: Batching, name: str, context: JobContext) -> None:
        self.runner, self.name = runner, name
        self._batching, self._context = batching, context
        self._flops = row_flops(runner.table.config, runner.table.tensor_index)
        self._key_share = key_share(runner.table.config)
        self.cpu_offload = CpuOffload(runner)

    def forward(
        self, batch: Batch, call: str = "forward", mask: Tensor | None = None, outputs: TokenOutputs = LOGPROBS
    ) -> Tensor:
        """Computes the output of the model for tokens, without gradients: float32 log-probs, or values, or `outputs`.

        `mask`, (tokens,) bool, selects the tokens that are scored, `loss_mask` by default. Without it the result is a
        token column with 0 outside the loss mask, with it only the entries under it, (mask.sum(),).
        """
        entries = batch.total_tokens if mask is None else int(mask.sum())
        forward = self.prepare(batch, call, outputs, mask)

        def deliver(values: dict[int, Tensor]) -> Tensor:
            column = forward.deliver(values)
            return column if mask is None else column[mask]  # a mask of this rank's rows, whose values are here now

        executor = self._context.executor
        return executor.column(forward.name, entries, forward.work, deliver, outputs.shape, outputs.dtype)

    def prepare(
        self, batch: Batch, call: str, outputs: TokenOutputs = LOGPROBS, mask: Tensor | None = None
    ) -> ForwardPass:
        """Transfers rows to the ranks of the model and returns the two parts of a forward pass over them."""
        # The rows are sent here, not in `work`, in which the ranks of other roles take no part.
        self._context.offload.release_engines()  # on all ranks: engines of several ranks have a barrier there
        with self._context.timer("row_dispatch"):
            # Other columns need not travel; and calls that depend on the same columns share the transfer.
            further = () if outputs.likeliest is None else (outputs.likeliest,)
            rows = batch.select_columns((*FORWARD_COLUMNS, *further))
            if mask is not None:
                rows["loss_mask"] = mask
            index = self._index(batch, rows)
            plan = self.plan_micro_batches(index, [[row] for row in range(len(index))])
            (micro_batches,) = self.gather_micro_batches(rows, index, [plan])
        name = f"{self.name}.{call}"

        def deliver(values: dict[int, Tensor]) -> Tensor:
            return scatter_column(name, index, self._output_ranks(plan), values, outputs.shape, outputs.dtype)

        work = partial(self._compute_outputs, plan, micro_batches, outputs)
        return ForwardPass(name, work, deliver)

    def _compute_outputs(
        self, plan: MicroBatchPlan, micro_batches: list[Batch], outputs: TokenOutputs
    ) -> dict[int, Tensor]:
        """Returns the outputs of the rows that this rank sends to their owners, by row number of the index."""
        self._context.offload.load_exclusively(self.cpu_offload, training=False)
        columns: dict[int, Tensor] = {}
        results = self.runner.infer(micro_batches, self._batching.temperature, plan.cp_sizes, outputs)
        rows = self._rows_of_rank(dist.get_rank(), plan)
        for numbers, micro, result in zip(rows, micro_batches, results, strict=bool(results)):
            if result is not None:
                entries, values = result
                column = torch.zeros(micro.total_tokens, *outputs.shape, dtype=outputs.dtype)
                column[entries] = values.view(-1, *outputs.shape).to(outputs.dtype)
                columns |= dict(zip(numbers, column.split(micro.lengths.tolist()), strict=True))
        return columns

    def _output_ranks(self, plan: MicroBatchPlan) -> list[tuple[int, list[int]]]:
        """Returns (rank, rows whose outputs it sends), the same on every rank."""
        return [
            (
                self.runner.output_rank(seat),
                [row for step, micro in enumerate(steps) if plan.is_output_rank(seat, step) for row in micro],
            )
            for seat, steps in enumerate(plan.rows)
        ]

    def plan_micro_batches(self, index: RowIndex, row_groups: Sequence[Sequence[int]]) -> MicroBatchPlan:
        """Packs rows into micro-batches and assigns these to data-parallel and context-parallel ranks.

        `row_groups` are rows of the index that must share a micro-batch. Where that is possible and saves enough,
        prefixes that rows share are computed once in a micro-batch. The plan is the same on every rank.
        """
        layout, budget, links = self.runner.layout, self._batching.tokens_per_micro_batch, index.links
        shares = links.saved >= LEAST_SAVED and can_share_prefixes(self.runner, index.schema)
        if shares:
            units = join_groups(row_groups, links, self._budgeted_tokens, self._flops, layout.dp, budget)
        else:
            lengths = [[index.lengths[row] for row in group] for group in row_groups]
            units = [
                Unit(list(rows), sum(group), sum(map(self._flops, group)))
                for rows, group in zip(row_groups, lengths, strict=True)
            ]
        plan_units = plan_by_length if self.runner.dynamic_cp else plan_evenly
        tokens, costs = [unit.tokens for unit in units], [unit.cost for unit in units]
        plan, shared = plan_units(tokens, costs, layout.dp, layout.cp, budget), Shared()

        def in_order(micro: Sequence[int]) -> list[int]:
            """Returns the rows of a micro-batch, rows with equally many computed and shared tokens as neighbours."""
            # Attention by matrices computes such neighbours together, see `training.packed_attention`.
            rows = [row for unit in micro for row in units[unit].rows]
            if shares:
                shared.update(SharingRows.of(links, sorted(rows)).shared)
            return sorted(rows, key=lambda row: (shared.get(row, (row, 0))[1], index.lengths[row]))

        return MicroBatchPlan([[in_order(micro) for micro in steps] for steps in plan.rows], plan.cp_sizes, shared)

    def _budgeted_tokens(self, length: int, shared: int) -> float:
        """Returns the tokens of a row in a micro-batch: computed ones, and a share for the keys that it copies."""
        return length - shared + self._key_share * shared

    def _index(self, batch: Batch, rows: Batch) -> RowIndex:
        """Returns the index of a batch for the transfer of `rows`; the roles of a concurrent block share it."""
        key = (Fingerprint(batch, INDEXED_COLUMNS), Fingerprint(rows, rows.names()))
        return self._context.executor.once(key, lambda: self._context.rows.index(batch, rows))

    def gather_micro_batches(self, batch: Batch, index: RowIndex, plans: Sequence[MicroBatchPlan]) -> list[list[Batch]]:
        """Transfers the rows of plans to the ranks that compute them, in one exchange; all ranks call it together.

        Each row is in one plan. The result has this rank's micro-batches of each plan, with the columns of its stage.
        """
        # Roles of a concurrent block that have the same layout, such as actor and reference, share what is received.
        check_routed_experts(batch, self.runner.table.config)
        check_selected_keys(batch, self.runner.table.config)
        omitted = [name for name in self._omitted if name in index.schema]
        key = (Fingerprint(batch, batch.names()), self.runner.placement, self.runner.table.config, omitted, plans)
        return self._context.executor.once(key, lambda: self._gather(batch, index, plans))

    @property
    def _omitted(self) -> tuple[str, ...]:
        """Columns that the model does not read: its distributions are over the vocabulary, or it has none."""
        return () if self._batching.on_support and self.head == "language" else SUPPORT_COLUMNS

    def _gather(self, batch: Batch, index: RowIndex, plans: Sequence[MicroBatchPlan]) -> list[list[Batch]]:
        slots = range(len(plans[0].rows))
        by_slot = [[row for plan in plans for micro in plan.rows[slot] for row in micro] for slot in slots]
        stages, model = range(self.runner.layout.pp), self.runner.table.config
        schema = {name: column for name, column in index.schema.items() if name not in self._omitted}
        by_stage = [columns_needed(schema, self.runner.stage(stage), model) for stage in stages]
        places = [self.runner.placement.coordinates(rank) for rank in range(dist.get_world_size())]
        wanted = [by_slot[at.dp * self.runner.layout.cp + at.cp] if at else [] for at in places]
        needed = [by_stage[at.pp] if at else [] for at in places]
        embeds = [at is not None and at.pp == 0 for at in places]  # only the first stage embeds images
        # A context-parallel rank receives whole rows: the loss needs all scored tokens, and with dynamic context the
        # slices change from step to step.
        rows = gather_rows(batch, index, wanted, needed, embeds)
        numbers = [self._rows_of_rank(dist.get_rank(), plan) for plan in plans]
        micro_batches = iter(rows.split([len(micro) for steps in numbers for micro in steps]))
        return [
            [mark_shared(next(micro_batches), micro, plan.shared) for micro in steps]
            for plan, steps in zip(plans, numbers, strict=True)
        ]

    def _named(self, part: StoredBox) -> StoredBox:
        """Returns a part of a checkpoint under the name of the role."""
        return replace(part, namespace=f"{self.name}/{part.namespace}")

    def _rows_of_rank(self, rank: int, plan: MicroBatchPlan) -> list[list[int]]:
        """Returns the rows of each micro-batch of a rank of the job; none outside the placement."""
        at = self.runner.placement.coordinates(rank)
        return plan.rows[at.dp * self.runner.layout.cp + at.cp] if at else []


def columns_needed(schema: Mapping[str, ColumnSchema], stage: Stage, model: HFConfig) -> list[ColumnPart]:
    """Returns what the ranks of a pipeline stage read of the columns of a batch."""
    # The first stage embeds the tokens. The last one scores them and computes the loss, from any column. Each stage
    # replays the choices of its layers. The lengths of the rows are known to every rank.
    replayed = {ROUTED_EXPERTS, *SELECTION_COLUMNS}
    whole = schema.keys() - replayed if stage.is_last else {"tokens"} if stage.is_first else set()
    parts = [ColumnPart(name) for name in sorted(whole)]
    if ROUTED_EXPERTS in schema and (layers := replayed_layers(model, stage)):
        parts.append(ColumnPart(ROUTED_EXPERTS, layers))
    if SELECTED_KEYS in schema and model.indexer and (layers := selecting_layers(model, stage)):
        places = tuple(map(model.indexer.selecting.index, layers))
        parts += [ColumnPart(SELECTION_SIZES), ColumnPart(SELECTED_KEYS, places)]
    return parts
