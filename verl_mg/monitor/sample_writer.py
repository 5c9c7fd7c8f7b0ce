"""Writing down what the policy wrote; see `samples` for where and how."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from torch import Tensor

from verl_mg.batch import Batch, ColumnKind
from verl_mg.data import Prompts
from verl_mg.monitor.sample_columns import Column, other_columns
from verl_mg.monitor.sample_schema import (
    NUMBERS,
    PART,
    PARTS,
    TEXTS,
    TOKENS,
    TURNS,
    FileMetadata,
    arrow_type,
    describe,
    file_of,
    iteration_folder,
    schema,
)
from verl_mg.roles.reward import RewardRole
from verl_mg.roles.rollout_record import RolloutRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

ROWS_AT_A_TIME = 64
"""Of which tables are made: they bound the memory, and are what a reader passes over in one step."""
SPACE = "\u2581"
"""What SentencePiece writes for a space, which decoding would drop at the beginning of a text."""


class SampleWriter:
    """Writes the samples of this rank, the first `limit` of an iteration. That it failed is told, and stops nothing."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        about: FileMetadata,
        scorer: RewardRole,
        prompts: Prompts,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None = None,
    ) -> None:
        self._folder, self._rank, self._about, self._limit = folder, rank, about, limit
        self._scorer, self._prompts, self._tokenizer = scorer, prompts, tokenizer
        self._pieces: dict[int, str] = {}
        self._warned = False

    def write(self, iteration: int, handed: Sequence[RolloutRecord], trained_batches: Sequence[Batch]) -> None:
        """What a recipe was handed, and what it gave to roles to learn from; on disk when this returns."""
        if self._limit == 0:
            return
        file = file_of(iteration_folder(self._folder, iteration), self._rank)
        # Who reads all files of a folder passes over a name that begins with a dot.
        beside = file.with_name(f".{file.name}.partial")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._write(beside, iteration, handed, trained_batches)
            os.replace(beside, file)
            if self._rank == 0:
                _forget_further_ranks(file.parent, self._about.ranks)
        except (OSError, pa.ArrowException) as error:
            with suppress(OSError):
                beside.unlink()
            if not self._warned:
                log.warning("%s: cannot be written (%s); the run goes on, without samples where it fails", file, error)
            self._warned = True

    def _write(
        self, file: Path, iteration: int, handed: Sequence[RolloutRecord], trained_batches: Sequence[Batch]
    ) -> None:
        rows, given = sum(len(one.batch) for one in handed), tuple(describe(one.given) for one in handed)
        columns = [other_columns(one, trained_batches) for one in handed]
        # Where a batch has no rows here, it does not tell what a column is of.
        types = {
            name: arrow_type(column.kind, column.values)
            for one, own in zip(handed, columns, strict=True)
            for name, column in own.items()
            if len(one.batch)
        }
        as_written = schema(types, replace(self._about, rows=rows, calls=given))
        left = rows if self._limit is None else self._limit
        with parquet.ParquetWriter(file, as_written, compression="zstd") as writer:
            for call, (one, own) in enumerate(zip(handed, columns, strict=True)):
                count = min(left, len(one.batch))
                left -= count
                for part in torch.arange(count).split(ROWS_AT_A_TIME) if count else ():
                    writer.write_table(self._table(as_written, iteration, call, one.batch, own, part))

    def _table(
        self, as_written: pa.Schema, iteration: int, call: int, batch: Batch, others: Mapping[str, Column], part: Tensor
    ) -> pa.Table:
        """A few rows of a batch; null where it has no column of a name."""
        whole = batch.select_columns({*NUMBERS, *TOKENS, *_parts_of(batch)})
        for name, column in others.items():
            whole.put(_OTHER + name, column.values, column.kind)
        rows = whole.select(part)
        columns = {name: pa.nulls(len(rows), as_written.field(name).type) for name in as_written.names}
        columns |= {"iteration": pa.array([iteration] * len(rows)), "call": pa.array([call] * len(rows), pa.int32())}
        columns |= {name: _array(rows, name, kind) for name, kind in NUMBERS.items()}
        columns |= {name: _array(rows, name, pa.list_(kind)) for name, kind in TOKENS.items()}
        columns |= self._texts(rows)
        columns["turns"] = pa.array([_turns(mask) for mask in _responses(rows)], TURNS)
        for name, column in others.items():
            absent = None if column.present is None else ~column.present[part].numpy()
            columns[name] = _array(rows, _OTHER + name, as_written.field(name).type, absent)
        return pa.table([columns[name] for name in as_written.names], as_written)

    def _texts(self, rows: Batch) -> dict[str, pa.Array]:
        samples = [self._scorer.sample(rows, row) for row in range(len(rows))]
        told: dict[str, list[Any]] = {name: [getattr(one, name, None) for one in samples] for name in TEXTS}
        told["source"] = [self._prompts.by_id(prompt).source for prompt in rows["prompt_id"].tolist()]
        scores = {name.removeprefix(PART): rows[name].tolist() for name in _parts_of(rows)}
        parts = [
            [(name, values[row]) for name, values in scores.items() if values[row] == values[row]]  # not NaN
            for row in range(len(rows))
        ]
        distinct, which = rows["tokens"].unique(return_inverse=True)
        vocabulary = pa.array([self._piece(token) for token in distinct.tolist()], pa.string())
        pieces = vocabulary.take(pa.array(which.numpy()))
        return {name: pa.array(told[name], pa.string()) for name in TEXTS} | {
            "parts": pa.array(parts, PARTS),
            "pieces": pa.ListArray.from_arrays(_edges(rows.lengths), pieces),
        }

    def _piece(self, token: int) -> str:
        """The text of a token."""
        if token not in self._pieces:
            word = self._tokenizer.convert_ids_to_tokens(token)
            spaced = isinstance(word, str) and SPACE in word
            self._pieces[token] = word.replace(SPACE, " ") if spaced else self._tokenizer.decode([token])
        return self._pieces[token]


_OTHER = "other."


def _parts_of(batch: Batch) -> list[str]:
    return [name for name in batch.names() if name.startswith(PART)]


def _array(rows: Batch, name: str, kind: pa.DataType, absent: np.ndarray | None = None) -> pa.Array:
    """A column as a file has it."""
    values = rows[name].detach().cpu()
    numbers = (values.float() if values.dtype.is_floating_point else values).numpy().reshape(-1)
    if not pa.types.is_list(kind):
        return pa.array(numbers, mask=absent).cast(kind)
    lengths = rows.lengths if rows.kind(name) is ColumnKind.TOKEN else torch.ones_like(rows.lengths)
    edges = _edges(lengths * int(np.prod(values.shape[1:])))
    entries = pa.array(numbers).cast(kind.value_type)
    return pa.ListArray.from_arrays(edges, entries, mask=None if absent is None else pa.array(absent))


def _edges(lengths: Tensor) -> pa.Array:
    return pa.array(np.concatenate([[0], lengths.numpy().cumsum()]), pa.int32())


def _responses(rows: Batch) -> list[tuple[int, np.ndarray]]:
    """Where each row's response begins, and its tokens under the loss mask."""
    masks = rows["loss_mask"].split(rows.lengths.tolist())
    starts = rows["prompt_length"].tolist()
    return [(start, mask[start:].numpy()) for start, mask in zip(starts, masks, strict=True)]


def _turns(response: tuple[int, np.ndarray]) -> list[dict[str, Any]]:
    """The runs of a response that the policy wrote, and those that tools did."""
    start, written = response
    if not len(written):
        return []
    edges = [0, *(np.flatnonzero(np.diff(written)) + 1).tolist(), len(written)]
    return [
        {"by": "policy" if written[begin] else "tool", "start": start + begin, "end": start + end}
        for begin, end in pairwise(edges)
    ]


def _forget_further_ranks(folder: Path, ranks: int) -> None:
    """What an earlier start of the run, with more ranks, left of this iteration."""
    for file in folder.glob("rank-*.parquet"):
        if int(file.stem.removeprefix("rank-")) >= ranks:
            file.unlink()
