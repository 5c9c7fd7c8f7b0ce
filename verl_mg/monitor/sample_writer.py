"""Recording of samples; see `sample_schema` for the files and their columns.

    RolloutRecord (received, batch, conversations), trained batches
        --> other_columns: columns that the recipe has added or changed
        --> _table: up to ROWS_PER_TABLE rows with the columns of the file --> a hidden file
        --> renamed to rank-R.parquet

Each rank writes its own file, in the caller's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from torch import Tensor

from verl_mg.batch import COUNTED_BY, Batch, ColumnKind
from verl_mg.engines.trajectory import without_agent
from verl_mg.jsonl import replacing
from verl_mg.monitor.arrow_arrays import lists, maps, numbers, texts
from verl_mg.monitor.sample_schema import COLUMN as IMAGES
from verl_mg.monitor.sample_schema import (
    COLUMN_RENAMES,
    CONVERSATION,
    NUMBERS,
    PART,
    PARTS,
    RECEIVED,
    TEXTS,
    TOKENS,
    TURNS,
    FileMetadata,
    ImageFiles,
    arrow_type,
    describe,
    file_of,
    iteration_folder,
    schema,
)
from verl_mg.roles.reward import SampleTexts
from verl_mg.rows.samples import NOT_RECORDED, RolloutRecord

log = logging.getLogger(__name__)

# Rows that are converted at a time: they bound the memory, and are what a reader skips in one step.
ROWS_PER_TABLE = 64
# SentencePiece's character for a space, which decoding would drop at the begin of a text.
SENTENCEPIECE_SPACE = "\u2581"
_OTHER = "other."
_STANDARD = {*NUMBERS, *TOKENS, *NOT_RECORDED, "iteration", "call"}


class SampleWriter:
    """Writes the samples of this rank, the first `limit` of an iteration; a failure is logged and stops nothing."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        metadata: FileMetadata,
        texts: SampleTexts,
        limit: int | None = None,
    ) -> None:
        self._folder, self._rank, self._metadata, self._limit = folder, rank, metadata, limit
        self._images = ImageFiles(folder)
        self._sample_texts = texts
        self._pieces: dict[int, str] = {}
        self._warned = False

    def write(self, iteration: int, records: Sequence[RolloutRecord], trained_batches: Sequence[Batch]) -> None:
        """Writes the samples of an iteration, as the recipe received them and as roles were trained on them."""
        if self._limit == 0:
            return
        file = file_of(iteration_folder(self._folder, iteration), self._rank)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            for part in file.parent.glob(f".*.{file.name}"):
                part.unlink()  # of a process that was killed while it wrote
            with replacing(file) as hidden:
                self._write(hidden, iteration, records, trained_batches)
            if self._rank == 0:
                _delete_files_of_further_ranks(file.parent, self._metadata.ranks)
        except (OSError, pa.ArrowException) as error:
            if not self._warned:
                log.warning("%s: cannot be written (%s); the run continues without these samples", file, error)
            self._warned = True

    def _write(
        self, file: Path, iteration: int, records: Sequence[RolloutRecord], trained_batches: Sequence[Batch]
    ) -> None:
        num_rows = sum(len(record.batch) for record in records)
        calls = tuple(describe(record.received) for record in records)
        columns = [other_columns(record, trained_batches) for record in records]
        # A batch without rows on this rank does not show the kinds of its columns.
        types = {
            name: arrow_type(column.kind, column.values)
            for record, others in zip(records, columns, strict=True)
            for name, column in others.items()
            if len(record.batch)
        }
        if any(record.batch.images for record in records):
            types[IMAGES] = pa.list_(pa.string())
        file_schema = schema(types, replace(self._metadata, rows=num_rows, calls=calls))
        remaining = num_rows if self._limit is None else self._limit
        with parquet.ParquetWriter(file, file_schema, compression="zstd") as writer:
            for call, (record, others) in enumerate(zip(records, columns, strict=True)):
                # The limit counts episodes, so that no sample of agents is recorded in part.
                numbers: dict[int, int] = {}
                episodes = without_agent(record.batch["trajectory"]).tolist()
                places = torch.tensor([numbers.setdefault(episode, len(numbers)) for episode in episodes])
                written = (places < remaining).nonzero().flatten()
                remaining -= len(numbers)
                for index in written.split(ROWS_PER_TABLE) if len(written) else ():
                    writer.write_table(self._table(file_schema, iteration, call, record, others, index))

    def _table(
        self,
        file_schema: pa.Schema,
        iteration: int,
        call: int,
        record: RolloutRecord,
        others: Mapping[str, _Column],
        index: Tensor,
    ) -> pa.Table:
        """Returns some rows of a batch, with nulls where it has no column of a name."""
        batch = record.batch
        whole = batch.select_columns({*NUMBERS, *TOKENS, *_parts_of(batch), *COUNTED_BY.values()})
        for name, column in others.items():
            whole.put(_OTHER + name, column.values, column.kind)
        rows = whole.select(index)
        columns = {name: pa.nulls(len(rows), file_schema.field(name).type) for name in file_schema.names}
        places = {"iteration": iteration, "call": call}
        columns |= {
            name: numbers(np.full(len(rows), place), file_schema.field(name).type) for name, place in places.items()
        }
        columns |= {name: _array(rows, name, kind) for name, kind in NUMBERS.items() if name in rows}
        columns |= {name: _array(rows, name, pa.list_(kind)) for name, kind in TOKENS.items()}
        columns |= self._texts(rows) | {CONVERSATION: texts(_conversations(record, index))}
        if rows.images is not None:
            self._images.write(rows.images)
            keys = texts([image.key for row in rows.images for image in row])
            columns[IMAGES] = lists([len(row) for row in rows.images], keys)
        masks = zip(rows["prompt_length"].tolist(), rows["loss_mask"].split(rows.lengths.tolist()), strict=True)
        columns["turns"] = _array_of_turns([_turns(start, mask[start:].numpy()) for start, mask in masks])
        for name, column in others.items():
            absent = None if column.present is None else ~column.present[index].numpy()
            columns[name] = _array(rows, _OTHER + name, file_schema.field(name).type, absent)
        return pa.table([columns[name] for name in file_schema.names], file_schema)

    def _texts(self, rows: Batch) -> dict[str, pa.Array]:
        samples = [self._sample_texts.of_row(rows, row) for row in range(len(rows))]
        columns: dict[str, list[Any]] = {name: [getattr(sample, name, None) for sample in samples] for name in TEXTS}
        prompts = [self._sample_texts.prompts.by_id(prompt) for prompt in rows["prompt_id"].tolist()]
        # With what the template begins a reply, which is in the response too, as rewards see it.
        columns |= {"prompt": [prompt.text for prompt in prompts], "source": [prompt.source for prompt in prompts]}
        # Each distinct token becomes text once, not once for each of its places.
        distinct, which = rows["tokens"].unique(return_inverse=True)
        pieces = texts([self._piece(token) for token in distinct.tolist()]).take(numbers(which.numpy()))
        return {name: texts(column) for name, column in columns.items()} | {
            "parts": _parts(rows),
            "pieces": lists(rows.lengths.numpy(), pieces),
        }

    def _piece(self, token: int) -> str:
        # Decoding one token of SentencePiece drops its space, so that words would run together.
        if token not in self._pieces:
            tokenizer = self._sample_texts.tokenizer
            word = tokenizer.convert_ids_to_tokens(token)
            spaced = isinstance(word, str) and SENTENCEPIECE_SPACE in word
            self._pieces[token] = word.replace(SENTENCEPIECE_SPACE, " ") if spaced else tokenizer.decode([token])
        return self._pieces[token]


# -- columns of a batch in addition to the standard ones


@dataclass(frozen=True)
class _Column:
    kind: ColumnKind
    values: Tensor
    present: Tensor | None = None  # (n,) bool, the rows that have it; None: all


def other_columns(record: RolloutRecord, trained_batches: Sequence[Batch]) -> dict[str, _Column]:
    """Returns the columns in addition to the standard ones, by the names under which they are written."""
    # The identity is compared first: most columns are the same tensor, and comparing values reads all of them.
    batch, received = record.batch, record.received
    others = {
        COLUMN_RENAMES.get(name, name): _Column(batch.kind(name), batch[name])
        for name in batch.names()
        if name not in _STANDARD and not name.startswith(PART)
    }
    changed = {
        RECEIVED + name: _Column(received.kind(name), received[name])
        for name in received.names()
        if name not in batch or (batch[name] is not received[name] and not _equal(batch[name], received[name]))
    }
    return _columns_of_selections(batch, trained_batches) | others | changed


def _columns_of_selections(batch: Batch, trained_batches: Sequence[Batch]) -> dict[str, _Column]:
    """Returns columns that a recipe has put into batches of selected rows, at the places of these rows in `batch`."""
    columns: dict[str, _Column] = {}
    for other in trained_batches:
        if other is batch or not {"sample_id", "prompt_id", "tokens"} <= set(other.names()):
            continue
        row_of = {key: row for row, key in enumerate(_row_keys(other))}
        pairs = [(row, row_of[key]) for row, key in enumerate(_row_keys(batch)) if key in row_of]
        if pairs:
            destination, source = torch.tensor(pairs).T
            names = [n for n in other.names() if n not in batch and n not in _STANDARD and not n.startswith(PART)]
            rows = other.select_columns(names).select(source)
            for name in names:
                columns[name] = _fill(columns.get(name), batch, destination, rows.kind(name), rows[name])
    return columns


def _fill(column: _Column | None, batch: Batch, rows: Tensor, kind: ColumnKind, values: Tensor) -> _Column:
    """Returns a column, new or with earlier values, with the values of some rows, whose indices are ascending."""
    if column is None:
        nothing = torch.zeros(len(batch), dtype=torch.bool)
        column = _Column(kind, values.new_zeros(int(batch.counts(kind).sum()), *values.shape[1:]), nothing)
    filled = torch.zeros(len(batch), dtype=torch.bool)
    filled[rows] = True
    column.values[batch.entries(rows, kind)] = values.detach()
    assert column.present is not None
    return _Column(kind, column.values, column.present | filled)


def _row_keys(batch: Batch) -> Iterator[tuple[int, int, bytes]]:
    """Yields id, prompt and tokens of each sample: its id is not enough, since a recipe may have assigned new ones."""
    tokens = batch["tokens"].split(batch.lengths.tolist())
    for sample, prompt, row in zip(batch["sample_id"].tolist(), batch["prompt_id"].tolist(), tokens, strict=True):
        yield sample, prompt, row.numpy().tobytes()


def _equal(a: Tensor, b: Tensor) -> bool:
    # NaN is equal to NaN here: a missing value has not been changed.
    if a.dtype.is_floating_point and b.dtype.is_floating_point:
        return a.shape == b.shape and bool(torch.isclose(a, b, 0, 0, equal_nan=True).all())
    return torch.equal(a, b)


def _conversations(record: RolloutRecord, index: Tensor) -> list[str | None]:
    """Returns the conversation of each of some rows that is the first of its episode."""
    if not record.conversations:
        return [None] * len(index)
    first: dict[int, int] = {}
    episodes = without_agent(record.batch["trajectory"]).tolist()
    for row in record.batch["sample_id"].argsort().tolist():
        first.setdefault(episodes[row], row)
    return [record.conversations.get(episodes[row]) if row == first[episodes[row]] else None for row in index.tolist()]


# -- arrays


def _parts_of(batch: Batch) -> list[str]:
    return [name for name in batch.names() if name.startswith(PART)]


def _parts(rows: Batch) -> pa.MapArray:
    scores = {name.removeprefix(PART): rows[name].tolist() for name in _parts_of(rows)}
    parts = [
        [(name, values[row]) for name, values in scores.items() if values[row] == values[row]]  # not NaN
        for row in range(len(rows))
    ]
    every = [entry for row in parts for entry in row]
    values = numbers(np.array([value for _, value in every]), PARTS.item_type)
    return maps([len(row) for row in parts], texts([name for name, _ in every]), values)


def _array(rows: Batch, name: str, kind: pa.DataType, absent: np.ndarray | None = None) -> pa.Array:
    """Returns a column as it is in the file, null in the rows `absent`."""
    values = rows[name].detach().cpu()
    # NumPy has no bfloat16.
    entries = (values.float() if values.dtype.is_floating_point else values).numpy().reshape(-1)
    if not pa.types.is_list(kind):
        return numbers(entries, kind, absent)
    lengths = rows.counts(rows.kind(name)) * int(np.prod(values.shape[1:]))
    return lists(lengths.numpy(), numbers(entries, kind.value_type), absent)


def _turns(start: int, generated: np.ndarray) -> list[tuple[str, int, int]]:
    """Returns the ranges of a response by the policy or by tools: of 2 and T T F, 2 to 4 and 4 to 5."""
    if not len(generated):
        return []
    edges = [0, *(np.flatnonzero(np.diff(generated)) + 1).tolist(), len(generated)]
    return [("policy" if generated[begin] else "tool", start + begin, start + end) for begin, end in pairwise(edges)]


def _array_of_turns(rows: Sequence[Sequence[tuple[str, int, int]]]) -> pa.ListArray:
    turns = [turn for row in rows for turn in row]
    by, *ends = zip(*turns, strict=True) if turns else ((), (), ())
    columns = [texts(by), *(numbers(np.array(column, np.int32)) for column in ends)]
    entries = pa.StructArray.from_arrays(columns, fields=list(TURNS.value_type))
    return lists([len(row) for row in rows], entries)


def _delete_files_of_further_ranks(folder: Path, ranks: int) -> None:
    # Files of an earlier start of the run that had more ranks: a reader of the folder would take them for samples.
    for file in folder.glob("rank-*.parquet"):
        if int(file.stem.removeprefix("rank-")) >= ranks:
            file.unlink()
