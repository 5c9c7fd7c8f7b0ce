"""Recorded samples read as the batches that the recipe received; see `sample_schema` for the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import pyarrow as pa
import torch
import torch.distributed as dist
from pyarrow import ArrowException, compute, parquet
from torch import Tensor

from verl_mg.batch import Batch, ColumnKind
from verl_mg.engines.trajectory import without_agent
from verl_mg.errors import UserError
from verl_mg.monitor.sample_schema import COLUMN as IMAGES
from verl_mg.monitor.sample_schema import (
    COLUMN_RENAMES,
    CONVERSATION,
    PART,
    RECEIVED,
    SAMPLES,
    ColumnSchema,
    FileMetadata,
    ImageFiles,
    file_of,
    iteration_folder,
)
from verl_mg.rows.samples import GeneratedRows

Columns = Mapping[str, ColumnSchema]


class SampleReader:
    """Reads the samples of a run, on every rank the rows that it gets."""

    def __init__(self, run: Path) -> None:
        self._folder = run / SAMPLES
        self._images = ImageFiles(self._folder)

    def check(self, iterations: range, recipe: str, model: str, agents: Sequence[str]) -> None:
        """Raises UserError where an iteration is missing or incomplete, or of another recipe, model or other agents."""
        for iteration in iterations:
            files = self._metadata_of_ranks(iteration)
            if files[0].recipe != recipe:
                raise UserError(
                    f"{self._folder}: recorded with the recipe {files[0].recipe}, not {recipe}. Use that recipe."
                )
            if files[0].model != model:
                raise UserError(f"{self._folder}: recorded with another model. Write the run's model into model.path.")
            if files[0].agents != tuple(agents):
                recorded, given = (f"[{', '.join(names)}]" for names in (files[0].agents, agents))
                raise UserError(
                    f"rollout.agent_names: {self._folder} was recorded with {recorded}, not {given}. Write "
                    f"rollout.agent_names={recorded}."
                )

    def columns(self, iteration: int) -> list[Columns]:
        """Returns the columns of each batch of an iteration."""
        return _columns(self._metadata_of_ranks(iteration))

    def batches(self, iteration: int) -> list[GeneratedRows]:
        """Returns this rank's rows of each batch of an iteration.

        On as many ranks as the run had, each row is on the same rank as in the run. Otherwise groups stay together, and
        each rank has consecutive ones, in the order of their sample ids.
        """
        files = self._metadata_of_ranks(iteration)
        columns = _columns(files)
        calls = range(len(columns))
        if len(files) == dist.get_world_size():
            table = self._table(iteration, dist.get_rank())
            return [self._to_rows(_of_call(table, call), columns[call]) for call in calls]
        # Every rank reads all files, without a collective, and keeps its share.
        groups = [self._local_groups(iteration, len(files), call) for call in calls]
        tables = [self._table(iteration, rank, groups) for rank in range(len(files))]
        return [self._concat([_of_call(table, call) for table in tables], columns[call]) for call in calls]

    def _concat(self, tables: Sequence[pa.Table], columns: Columns) -> GeneratedRows:
        """Returns the rows of several ranks in the order of their sample ids."""
        parts = [self._to_rows(table, columns) for table in tables]
        batch = Batch.concat([part.batch for part in parts])
        conversations = {i: text for part in parts for i, text in part.conversations.items()}
        return GeneratedRows(batch.select(batch["sample_id"].argsort()), conversations)

    def _to_rows(self, table: pa.Table, columns: Columns) -> GeneratedRows:
        """Returns rows as the recipe received them."""
        batch, conversations = _to_batch(table, columns), {}
        if IMAGES in table.column_names:
            batch.images = self._images.read(keys or () for keys in table[IMAGES].to_pylist())
        if "trajectory" not in columns:  # recorded before there were trajectories
            batch["trajectory"] = batch["sample_id"]
        elif CONVERSATION in table.column_names:
            texts = table.filter(compute.is_valid(table[CONVERSATION]))
            episodes = map(without_agent, texts["trajectory"].to_pylist())
            conversations = dict(zip(episodes, texts[CONVERSATION].to_pylist(), strict=True))
        return GeneratedRows(batch, conversations)

    def _metadata_of_ranks(self, iteration: int) -> list[FileMetadata]:
        """Returns the metadata of each file of an iteration; UserError where something is missing."""
        first = self._read_metadata(iteration, 0)[0]
        files = [self._read_metadata(iteration, rank) for rank in range(first.ranks)]
        recorded, rows = sum(count for _, count in files), sum(metadata.rows for metadata, _ in files)
        if recorded < rows:
            raise UserError(
                f"{iteration_folder(self._folder, iteration)}: {recorded} of {rows} samples were recorded "
                "(record.samples_per_rank), but a replay needs all. Leave record.samples_per_rank out in the run."
            )
        return [metadata for metadata, _ in files]

    def _read_metadata(self, iteration: int, rank: int) -> tuple[FileMetadata, int]:
        """Returns the metadata of a file and its number of rows."""
        path = file_of(iteration_folder(self._folder, iteration), rank)
        try:
            metadata = parquet.read_metadata(path)
        except FileNotFoundError:
            raise UserError(f"{path}: does not exist. {self._remedy()}") from None
        except (ArrowException, OSError) as error:
            raise _unreadable(path, error) from None
        contents = FileMetadata.of(metadata.metadata)
        if contents is None:
            raise UserError(f"{path}: not written by verl_mg. {self._remedy()}")
        return contents, metadata.num_rows

    def _remedy(self) -> str:
        numbers = [int(folder.name) for folder in self._folder.glob("*") if folder.name.isdecimal()]
        if not numbers:
            return "Name the folder of a run that has recorded samples."
        return f"Choose one of the iterations {min(numbers)} to {max(numbers)} of the run, which have samples."

    def _table(self, iteration: int, rank: int, groups: Sequence[Sequence[int]] | None = None) -> pa.Table:
        """Returns the file of a rank, of each call only the given groups."""
        path = file_of(iteration_folder(self._folder, iteration), rank)
        rows = None
        if groups is not None:
            rows = compute.scalar(False)
            for call, members in enumerate(groups):
                of_groups = compute.field("group").isin(pa.array(members, pa.int64()))
                rows |= (compute.field("call") == call) & of_groups
        try:
            return parquet.read_table(path, filters=rows)
        except (ArrowException, OSError) as error:
            raise _unreadable(path, error) from None

    def _local_groups(self, iteration: int, num_files: int, call: int) -> list[int]:
        """Returns this rank's share of a call's groups, whose numbers are the ids of their first samples."""
        # Groups 0 4 8 12 16 on two ranks: 0 4, and 8 12 16.
        folder = iteration_folder(self._folder, iteration)
        numbers: set[int] = set()
        for rank in range(num_files):
            table = parquet.read_table(file_of(folder, rank), columns=["group"], filters=[("call", "==", call)])
            numbers |= set(table["group"].unique().to_pylist())
        groups, rank, world_size = sorted(set(map(without_agent, numbers))), dist.get_rank(), dist.get_world_size()
        share = groups[rank * len(groups) // world_size : (rank + 1) * len(groups) // world_size]
        return [number for number in numbers if without_agent(number) in share]


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]}). Record the run again.")


def _columns(files: Sequence[FileMetadata]) -> list[Columns]:
    # A rank without rows may not know the kinds of the columns.
    calls = range(max(len(file.calls) for file in files))
    return [max((file.calls[call] for file in files), key=_num_known) for call in calls]


def _num_known(columns: Columns) -> int:
    """Returns how many columns are described in full."""
    return sum(column.kind != ColumnKind.UNKNOWN for column in columns.values())


def _of_call(table: pa.Table, call: int) -> pa.Table:
    return table.filter(compute.equal(table["call"], call))


def _to_batch(table: pa.Table, columns: Columns) -> Batch:
    lengths = compute.list_value_length(table["tokens"]).to_numpy()
    batch = Batch(torch.from_numpy(lengths.copy()))  # Arrow's memory is read-only
    for name, column in columns.items():
        if not len(table):  # the file of a rank without rows may be without columns
            values = torch.empty(0)
        else:
            values = _part(table, name) if name.startswith(PART) else _values(table, name)
        # Several numbers per row or token are a flat list in the file.
        rows = values.shape[0] // prod(column.rest)
        batch.put(name, values.to(getattr(torch, column.dtype)).reshape(rows, *column.rest), ColumnKind(column.kind))
    return batch


def _values(table: pa.Table, name: str) -> Tensor:
    """Returns the entries of a column as it was received; entries of token columns one row after another."""
    # The column `received.NAME` is null in a call whose recipe has not changed the column.
    received = RECEIVED + name
    changed = received in table.column_names and table[received].null_count == 0
    column = table[received if changed else COLUMN_RENAMES.get(name, name)].combine_chunks()
    entries = column.flatten() if pa.types.is_list(column.type) else column
    return torch.from_numpy(entries.to_numpy(zero_copy_only=False).copy())


def _part(table: pa.Table, name: str) -> Tensor:
    """Returns a part of the reward, NaN where a row has no such part."""
    part = name.removeprefix(PART)
    return torch.tensor([dict(parts).get(part, float("nan")) for parts in table["parts"].to_pylist()])
