"""The samples of a run, read back as the batches that its recipe was handed; see `samples` for how they are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import torch
import torch.distributed as dist
from pyarrow import ArrowException, compute, parquet
from torch import Tensor

from verl_mg.batch import Batch, ColumnKind
from verl_mg.errors import UserError
from verl_mg.monitor.sample_schema import (
    GIVEN,
    OTHER_NAMES,
    PART,
    SAMPLES,
    ColumnSchema,
    FileMetadata,
    file_of,
    iteration_folder,
)

Columns = Mapping[str, ColumnSchema]


class SampleReader:
    """The samples of a run, in its folder. Every rank reads the rows that it gets."""

    def __init__(self, run: Path) -> None:
        self._folder = run / SAMPLES

    def check(self, iterations: range, recipe: str, model: str) -> None:
        """UserError where one of the iterations is not there whole, or is of another recipe or model."""
        for iteration in iterations:
            abouts = self._abouts(iteration)
            if abouts[0].recipe != recipe:
                raise UserError(f"{self._folder}: recorded with the recipe {abouts[0].recipe}, not {recipe}")
            if abouts[0].model != model:
                raise UserError(f"{self._folder}: recorded with another model; give model.path that of the run")

    def batches(self, iteration: int) -> list[Batch]:
        """This rank's rows of each batch of an iteration.

        On as many ranks as the run had each row lies where it lay. On others groups stay together, and each rank has a
        run of them, in the order of their sample ids.
        """
        abouts = self._abouts(iteration)
        calls = range(max(len(about.calls) for about in abouts))
        # A rank without rows may not know of what a column has entries.
        columns = [max((about.calls[call] for about in abouts), key=_known) for call in calls]
        if len(abouts) == dist.get_world_size():
            table = self._table(iteration, dist.get_rank())
            return [_batch(_of_call(table, call), columns[call]) for call in calls]
        own = [self._own_groups(iteration, len(abouts), call) for call in calls]
        tables = [self._table(iteration, rank, own) for rank in range(len(abouts))]
        return [_gathered([_of_call(table, call) for table in tables], columns[call]) for call in calls]

    def _abouts(self, iteration: int) -> list[FileMetadata]:
        """Of each rank that wrote; UserError where something is missing."""
        first = self._about(iteration, 0)[0]
        told = [self._about(iteration, rank) for rank in range(first.ranks)]
        kept, rows = sum(count for _, count in told), sum(about.rows for about, _ in told)
        if kept < rows:
            raise UserError(
                f"{iteration_folder(self._folder, iteration)}: {kept} of {rows} samples were recorded "
                "(record.samples_per_rank); "
                "a replay needs all of them"
            )
        return [about for about, _ in told]

    def _about(self, iteration: int, rank: int) -> tuple[FileMetadata, int]:
        """And how many rows there are."""
        path = file_of(iteration_folder(self._folder, iteration), rank)
        try:
            metadata = parquet.read_metadata(path)
        except FileNotFoundError:
            raise UserError(f"{path}: not there; {self._what_there_is()}") from None
        except (ArrowException, OSError) as error:
            raise _unreadable(path, error) from None
        about = FileMetadata.of(metadata.metadata)
        if about is None:
            raise UserError(f"{path}: not written by verl_mg; {self._what_there_is()}")
        return about, metadata.num_rows

    def _what_there_is(self) -> str:
        numbers = [int(folder.name) for folder in self._folder.glob("*") if folder.name.isdecimal()]
        if not numbers:
            return "name the folder of a run that has recorded samples"
        return f"iterations {min(numbers)} to {max(numbers)} of the run have samples"

    def _table(self, iteration: int, rank: int, groups: Sequence[Sequence[int]] | None = None) -> pa.Table:
        """What a rank wrote, of each call these groups alone."""
        path = file_of(iteration_folder(self._folder, iteration), rank)
        chosen = None
        if groups is not None:
            chosen = compute.scalar(False)
            for call, own in enumerate(groups):
                chosen |= (compute.field("call") == call) & compute.field("group").isin(pa.array(own, pa.int64()))
        try:
            return parquet.read_table(path, filters=chosen)
        except (ArrowException, OSError) as error:
            raise _unreadable(path, error) from None

    def _own_groups(self, iteration: int, writers: int, call: int) -> list[int]:
        """This rank's share of a call's groups, which have the ids of their first samples."""
        folder = iteration_folder(self._folder, iteration)
        every: set[int] = set()
        for writer in range(writers):
            table = parquet.read_table(file_of(folder, writer), columns=["group"], filters=[("call", "==", call)])
            every |= set(table["group"].unique().to_pylist())
        groups, rank, ranks = sorted(every), dist.get_rank(), dist.get_world_size()
        return groups[rank * len(groups) // ranks : (rank + 1) * len(groups) // ranks]


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]}); record the run anew")


def _known(columns: Columns) -> int:
    """How many columns are described in full."""
    return sum(column.kind != ColumnKind.UNKNOWN for column in columns.values())


def _of_call(table: pa.Table, call: int) -> pa.Table:
    return table.filter(compute.equal(table["call"], call))


def _gathered(tables: Sequence[pa.Table], columns: Columns) -> Batch:
    """The rows of several writers, in the order of their sample ids."""
    batch = Batch.concat([_batch(table, columns) for table in tables])
    return batch.select(batch["sample_id"].argsort())


def _batch(table: pa.Table, columns: Columns) -> Batch:
    """Rows as they were handed."""
    lengths = compute.list_value_length(table["tokens"]).to_numpy()
    batch = Batch(torch.from_numpy(lengths.copy()))
    for name, column in columns.items():
        values = _part(table, name) if name.startswith(PART) else _values(table, name)
        batch.put(name, values.to(getattr(torch, column.dtype)).reshape(-1, *column.rest), ColumnKind(column.kind))
    return batch


def _values(table: pa.Table, name: str) -> Tensor:
    """The entries of a column, those of tokens one after another."""
    before = GIVEN + name
    changed = before in table.column_names and table[before].null_count == 0
    column = table[before if changed else OTHER_NAMES.get(name, name)].combine_chunks()
    entries = column.flatten() if pa.types.is_list(column.type) else column
    return torch.from_numpy(entries.to_numpy(zero_copy_only=False).copy())


def _part(table: pa.Table, name: str) -> Tensor:
    """A part of the reward, NaN where it has none."""
    part = name.removeprefix(PART)
    return torch.tensor([dict(parts).get(part, float("nan")) for parts in table["parts"].to_pylist()])
