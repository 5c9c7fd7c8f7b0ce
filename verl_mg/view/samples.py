"""Samples of a run, from the Parquet files of its ranks: filters are pushed down to the files, text is read last."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        ("iteration", pa.int64()),
        ("call", pa.int32()),
        ("sample_id", pa.int64()),
        ("group", pa.int64()),
        ("prompt_id", pa.int64()),
        ("policy_version", pa.int64()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("source", pa.string()),
        ("finish", pa.string()),
        ("reward", pa.float32()),
        ("prompt_length", pa.int32()),
        ("loss_mask", pa.list_(pa.bool_())),
    ]
)
"""The columns that searches look at; a sample has more, see `Samples.one`."""
IDENTITY = ("iteration", "call", "sample_id")
BRIEF = (*IDENTITY, "group", "prompt_id", "policy_version", "source", "finish", "reward", "length")
EXCERPT = 240
"""Characters of a text that a list shows."""


@dataclass(frozen=True)
class Query:
    """Which samples, in which order; what is None is any.

    first, last: iterations. length_from, length_to: tokens of the response. text: stands in prompt or response, in
    upper or lower case.
    """

    first: int | None = None
    last: int | None = None
    call: int | None = None
    group: int | None = None
    prompt_id: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    length_from: int | None = None
    length_to: int | None = None
    finish: str | None = None
    source: str | None = None
    text: str | None = None
    sort: str = "sample_id"
    descending: bool = False
    offset: int = 0
    limit: int = 50

    def filter(self) -> pc.Expression | None:
        """What is asked of a row, its iteration left out: folders answer that."""
        field, length = pc.field, _length()
        asked: list[pc.Expression] = [
            field(name) == value
            for name in ("call", "group", "prompt_id", "finish", "source")
            if (value := getattr(self, name)) is not None
        ]
        for bound, column in (("reward", field("reward")), ("length", length)):
            if (low := getattr(self, f"{bound}_from")) is not None:
                asked.append(column >= low)
            if (high := getattr(self, f"{bound}_to")) is not None:
                asked.append(column <= high)
        if self.text:
            asked.append(_holds("prompt", self.text) | _holds("response", self.text))
        whole = None
        for one in asked:
            whole = one if whole is None else whole & one
        return whole


def _length() -> pc.Expression:
    # The mask is the smallest of the columns that have an entry a token.
    return pc.list_value_length(pc.field("loss_mask")) - pc.field("prompt_length")


def _columns(names: Iterable[str]) -> dict[str, pc.Expression]:
    return {name: _length() if name == "length" else pc.field(name) for name in names}


def _excerpt(name: str) -> pc.Expression:
    return pc.utf8_slice_codeunits(pc.field(name), 0, EXCERPT)


def _holds(column: str, text: str) -> pc.Expression:
    return pc.match_substring(pc.field(column), text, ignore_case=True)


class Samples:
    """`folder`: samples/ of a run, which need not be there yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def iterations(self) -> list[int]:
        """Those of which samples are there, in order."""
        try:
            return sorted(int(entry.name) for entry in self._folder.iterdir() if entry.name.isdecimal())
        except FileNotFoundError:
            return []

    def facets(self, first: int | None, last: int | None) -> dict[str, list[str]]:
        """The sources and the finish reasons that occur in these iterations."""
        found = self._scan(first, last, _columns(("source", "finish")), None)
        return {name: sorted(filter(None, found[name].unique().to_pylist())) for name in ("source", "finish")}

    def find(self, query: Query) -> dict[str, Any]:
        """`total`, how many samples there are, and `rows`, those of the page that was asked for, texts cut short."""
        found = self._scan(query.first, query.last, _columns(dict.fromkeys((*IDENTITY, query.sort))), query.filter())
        order = "descending" if query.descending else "ascending"
        keys = [(query.sort, order), *((name, order) for name in IDENTITY if name != query.sort)]
        page = found.sort_by(keys).slice(query.offset, query.limit).to_pylist()
        told = self._told(page)
        return {"total": found.num_rows, "rows": [told[_identity(row)] for row in page if _identity(row) in told]}

    def prompts(self, iteration: int) -> list[dict[str, Any]]:
        """Each prompt of an iteration: its number and text, how many samples, mean reward, mean length."""
        columns = _columns(("prompt_id", "reward", "length")) | {"prompt": _excerpt("prompt")}
        found = self._scan(iteration, iteration, columns, None)
        grouped = found.group_by("prompt_id", use_threads=False).aggregate(
            [("prompt", "first"), ("prompt", "count"), ("reward", "mean"), ("length", "mean")]
        )
        names = {"prompt_first": "prompt", "prompt_count": "samples", "reward_mean": "reward", "length_mean": "length"}
        renamed = grouped.rename_columns([names.get(name, name) for name in grouped.column_names])
        return [_finite(row) for row in renamed.sort_by("prompt_id").to_pylist()]

    def one(self, iteration: int, call: int, sample_id: int) -> dict[str, Any] | None:
        """A sample with all that is known of it and its tokens; None where there is no such sample."""
        wanted = (pc.field("call") == call) & (pc.field("sample_id") == sample_id)
        for file in filter(_readable, self._files(iteration, iteration)):
            for row in pq.read_table(file, filters=wanted).to_pylist():
                return _finite(row | {"parts": dict(row.get("parts") or ())})
        return None

    def _told(self, page: Sequence[dict[str, Any]]) -> dict[tuple[int, ...], dict[str, Any]]:
        """What a list tells of these samples, by iteration, call and number."""
        columns = _columns(BRIEF) | {name: _excerpt(name) for name in ("prompt", "response")}
        told: dict[tuple[int, ...], dict[str, Any]] = {}
        for iteration in {row["iteration"] for row in page}:
            ids = [row["sample_id"] for row in page if row["iteration"] == iteration]
            found = self._scan(iteration, iteration, columns, pc.field("sample_id").isin(ids))
            told |= {_identity(row): _finite(row) for row in found.to_pylist()}
        return told

    def _scan(
        self, first: int | None, last: int | None, columns: dict[str, pc.Expression], wanted: pc.Expression | None
    ) -> pa.Table:
        files = list(self._files(first, last))
        try:
            return _read(files, columns, wanted)
        except (OSError, pa.ArrowException):
            # A run that is resumed replaces its files; one that a disk has spoilt should not hide the others.
            return _read([file for file in files if _readable(file)], columns, wanted)

    def _files(self, first: int | None, last: int | None) -> Iterator[Path]:
        for iteration in self.iterations():
            if (first is None or iteration >= first) and (last is None or iteration <= last):
                yield from sorted((self._folder / f"{iteration:06d}").glob("rank-*.parquet"))


def _read(files: Sequence[Path], columns: dict[str, pc.Expression], wanted: pc.Expression | None) -> pa.Table:
    if not files:
        return ds.dataset(SCHEMA.empty_table()).to_table(columns=columns)
    dataset = ds.dataset([str(file) for file in files], schema=SCHEMA, format="parquet")
    return dataset.to_table(columns=columns, filter=wanted)


def _readable(file: Path) -> bool:
    try:
        pq.read_metadata(file)
    except (OSError, pa.ArrowException):
        return False
    return True


def _identity(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(row[name] for name in IDENTITY)


def _finite(value: Any) -> Any:
    """With None for numbers that JSON cannot tell."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list) else value
