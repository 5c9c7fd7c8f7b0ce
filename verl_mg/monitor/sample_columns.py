"""Which columns of a sample are written down beside those that every one has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_mg.batch import Batch, ColumnKind
from verl_mg.monitor.sample_schema import GIVEN, NUMBERS, OTHER_NAMES, PART, TOKENS
from verl_mg.roles.rollout_record import RolloutRecord

_KNOWN = {*NUMBERS, *TOKENS, "iteration", "call"}


@dataclass(frozen=True)
class Column:
    """A column of a batch; present: (n,) bool, the rows that have it, all without it."""

    kind: ColumnKind
    values: Tensor
    present: Tensor | None = None


def other_columns(one: RolloutRecord, trained_batches: Sequence[Batch]) -> dict[str, Column]:
    """By the names that they are written under; learnt: the batches that roles were given to learn from."""
    batch, given = one.batch, one.given
    own = {
        OTHER_NAMES.get(name, name): Column(batch.kind(name), batch[name])
        for name in batch.names()
        if name not in _KNOWN and not name.startswith(PART)
    }
    changed = {
        GIVEN + name: Column(given.kind(name), given[name])
        for name in given.names()
        if name in batch and batch[name] is not given[name] and not _same(batch[name], given[name])
    }
    return _brought_back(batch, trained_batches) | own | changed


def _brought_back(batch: Batch, trained_batches: Sequence[Batch]) -> dict[str, Column]:
    """A recipe may have chosen rows, and put what it found out into the batch of those."""
    found: dict[str, Column] = {}
    for other in trained_batches:
        if other is batch or not {"sample_id", "prompt_id", "tokens"} <= set(other.names()):
            continue
        place = {key: row for row, key in enumerate(_keys(other))}
        pairs = [(row, place[key]) for row, key in enumerate(_keys(batch)) if key in place]
        if pairs:
            here, there = torch.tensor(pairs).T
            names = [n for n in other.names() if n not in batch and n not in _KNOWN and not n.startswith(PART)]
            rows = other.select_columns(names).select(there)
            for name in names:
                found[name] = _filled(found.get(name), batch, here, rows.kind(name), rows[name])
    return found


def _filled(column: Column | None, batch: Batch, here: Tensor, kind: ColumnKind, values: Tensor) -> Column:
    """The column, where it was there before, with the values of the rows `here`, which rise."""
    if column is None:
        entries = batch.total_tokens if kind is ColumnKind.TOKEN else len(batch)
        nothing = torch.zeros(len(batch), dtype=torch.bool)
        column = Column(kind, values.new_zeros(entries, *values.shape[1:]), nothing)
    now = torch.zeros(len(batch), dtype=torch.bool)
    now[here] = True
    column.values[batch.expand_to_tokens(now) if kind is ColumnKind.TOKEN else now] = values.detach()
    assert column.present is not None
    return Column(kind, column.values, column.present | now)


def _keys(batch: Batch) -> Iterator[tuple[int, int, bytes]]:
    """What tells a sample from others: a recipe may have given its rows new ids."""
    tokens = batch["tokens"].split(batch.lengths.tolist())
    for sample, prompt, own in zip(batch["sample_id"].tolist(), batch["prompt_id"].tolist(), tokens, strict=True):
        yield sample, prompt, own.numpy().tobytes()


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype.is_floating_point and other.dtype.is_floating_point:
        return one.shape == other.shape and bool(torch.isclose(one, other, 0, 0, equal_nan=True).all())
    return torch.equal(one, other)
