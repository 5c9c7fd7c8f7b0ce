"""Samples of a run: lists by the index, single samples and conversations from the Parquet files of the ranks."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from verl_mg.view.index import SampleIndex
from verl_mg.view.rows import (
    ADDED,
    COLUMN,
    EXCERPT,
    IDENTITY,
    NOTHING,
    TRAJECTORY,
    join_counts,
    parse_conversation,
    read_excerpts,
)
from verl_mg.view.search import Query, Search

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
        ("trajectory", pa.int64()),
        (COLUMN, pa.string()),
    ]
)
"""Columns of the lists of an iteration; a sample has more. Files of earlier runs have no trajectory."""
BRIEF = (*IDENTITY, "trajectory", "group", "prompt_id", "policy_version", "source", "finish", "reward", "length")
# Seconds that a request searches texts; the next one continues.
SEARCH_SECONDS = 0.5
# Searches that are kept, for further pages of them. One that matches 10 million samples has 40 MB.
SEARCHES = 4


def _length() -> pc.Expression:
    # The mask is the smallest column with one entry per token.
    return pc.list_value_length(pc.field("loss_mask")) - pc.field("prompt_length")


def _trajectory() -> pc.Expression:
    return pc.coalesce(pc.field("trajectory"), pc.field("sample_id"))


def _columns(names: Iterable[str]) -> dict[str, pc.Expression]:
    computed = {"length": _length(), "trajectory": _trajectory()}
    return {name: computed.get(name, pc.field(name)) for name in names}


def _excerpt(name: str) -> pc.Expression:
    return pc.utf8_slice_codeunits(pc.field(name), 0, EXCERPT)


class Samples:
    """Samples in a folder `samples/`, which may not exist yet; used by all threads of the server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.index = SampleIndex(folder)
        self._lock = threading.Lock()
        self._searches: OrderedDict[tuple[Any, ...], Search] = OrderedDict()

    def facets(self, first: int | None, last: int | None) -> dict[str, Any]:
        """Returns `source` and `finish`, the texts in a range of iterations, and whether the last has conversations."""
        texts: dict[str, set[str]] = {"source": set(), "finish": set()}
        segments = self.index.segments(first, last)
        within = Query(first=first, last=last)
        for segment in segments:
            rows = within.rows(segment)
            for name, known in texts.items():
                names = segment.names(name)
                places = range(len(names)) if rows is None else np.unique(segment.column(name)[rows]).tolist()
                known.update(names[place] for place in places if place >= 0)
        agents = False
        if segments:
            turns, iterations = (segments[-1].column(name) for name in ("agent_turns", "iteration"))
            newest = iterations[iterations <= (segments[-1].last if last is None else last)].max(initial=0)
            agents = bool((turns[iterations == newest] != NOTHING).any())
        return {name: sorted(known) for name, known in texts.items()} | {"agents": agents}

    def find(self, query: Query) -> dict[str, Any]:
        """Returns the number of matching samples, a page of them with excerpts, and the progress of the index."""
        with self._lock:
            search = self._search(query)
            search.advance(SEARCH_SECONDS)
            total, page = search.page(query)
        texts = {_identity(row): row for row in read_excerpts(self._folder, page, search.terms)}
        listed = [
            {name: row[name] for name in (*BRIEF, *ADDED)} | texts[_identity(row)]
            for row in page
            if _identity(row) in texts
        ]
        progress = self.index.progress(search.segments, query.first, query.last)
        return {"total": total, "rows": _finite(listed), "share": search.share, "index": progress}

    def _search(self, query: Query) -> Search:
        """Returns the search of a query; as long as its segments are the same, the one of an earlier call."""
        segments = self.index.segments(query.first, query.last)
        # A kept search refers to its segments, so no other segment can have one of these ids.
        key = (query.selection(), query.descending, *map(id, segments))
        search = self._searches.pop(key, None) or Search(segments, query)
        self._searches[key] = search
        while len(self._searches) > SEARCHES:
            self._searches.popitem(last=False)
        return search

    def prompts(self, iteration: int) -> list[dict[str, Any]]:
        """Returns the prompts of an iteration: id and text, number of samples, mean reward, mean length."""
        # A trajectory counts once, by its first segment.
        columns = _columns((*IDENTITY, "trajectory", "prompt_id", "reward", "length")) | {"prompt": _excerpt("prompt")}
        table = _first_of_each(self._scan(iteration, iteration, columns, None))
        grouped = table.group_by("prompt_id", use_threads=False).aggregate(
            [("prompt", "first"), ("prompt", "count"), ("reward", "mean"), ("length", "mean")]
        )
        names = {"prompt_first": "prompt", "prompt_count": "samples", "reward_mean": "reward", "length_mean": "length"}
        renamed = grouped.rename_columns([names.get(name, name) for name in grouped.column_names])
        return [_finite(row) for row in renamed.sort_by("prompt_id").to_pylist()]

    def get(self, iteration: int, call: int, sample_id: int) -> dict[str, Any] | None:
        """Returns a sample with all columns but its conversation; None where there is no such sample."""
        return self._row(iteration, call, sample_id, lambda field: field.name != COLUMN)

    def conversation(self, iteration: int, call: int, sample_id: int) -> dict[str, Any] | None:
        """Returns a sample without its token columns, its trajectory's conversation, or None, and the rows of it."""
        # A row has hundreds of thousands of tokens, which the conversation does not need.
        sample = self._row(iteration, call, sample_id, lambda f: f.name != COLUMN and not pa.types.is_list(f.type))
        if sample is None:
            return None
        trajectory = sample.get("trajectory", sample_id)
        selected = (pc.field("call") == call) & (_trajectory() == trajectory)
        text = self._scan(iteration, iteration, _columns((COLUMN,)), selected & pc.field(COLUMN).is_valid())
        conversation = parse_conversation(text[COLUMN][0].as_py()) if len(text) else None
        if conversation is None:
            return None
        rows = self._listed(iteration, selected).sort_by("sample_id").to_pylist()
        return {"sample": sample, "conversation": _finite(conversation), "rows": _finite(rows)}

    def _row(
        self, iteration: int, call: int, sample_id: int, wanted: Callable[[pa.Field], bool]
    ) -> dict[str, Any] | None:
        selected = (pc.field("call") == call) & (pc.field("sample_id") == sample_id)
        for file in filter(_readable, self._files(iteration, iteration)):
            columns = [field.name for field in pq.read_schema(file) if wanted(field)]
            for row in pq.read_table(file, columns=columns, filters=selected).to_pylist():
                return _finite(row | {"parts": dict(row.get("parts") or ())})
        return None

    def _listed(self, iteration: int, condition: pc.Expression) -> pa.Table:
        """Returns rows of an iteration with the columns of a list, in any order."""
        columns = _columns(BRIEF) | {name: _excerpt(name) for name in ("prompt", "response")}
        table = self._scan(iteration, iteration, columns, condition)
        return join_counts(table, self._files(iteration, iteration))

    def _scan(
        self, first: int | None, last: int | None, columns: dict[str, pc.Expression], condition: pc.Expression | None
    ) -> pa.Table:
        files = list(self._files(first, last))
        try:
            return _read(files, columns, condition)
        except (OSError, pa.ArrowException):
            # A resumed run replaces its files; a damaged file must not hide the others.
            return _read([file for file in files if _readable(file)], columns, condition)

    def _files(self, first: int | None, last: int | None) -> Iterator[Path]:
        for iteration in self.index.iterations():
            if (first is None or iteration >= first) and (last is None or iteration <= last):
                yield from sorted((self._folder / f"{iteration:06d}").glob("rank-*.parquet"))


def _read(files: Sequence[Path], columns: dict[str, pc.Expression], condition: pc.Expression | None) -> pa.Table:
    if not files:
        return ds.dataset(SCHEMA.empty_table()).to_table(columns=columns)
    dataset = ds.dataset([str(file) for file in files], schema=SCHEMA, format="parquet")
    return dataset.to_table(columns=columns, filter=condition)


def _first_of_each(rows: pa.Table) -> pa.Table:
    """Returns the row of each trajectory with the lowest sample id."""
    others = [name for name in rows.column_names if name not in TRAJECTORY]
    grouped = rows.sort_by("sample_id").group_by(list(TRAJECTORY), use_threads=False)
    first = grouped.aggregate([(name, "first") for name in others])
    return first.rename_columns([name.removesuffix("_first") for name in first.column_names])


def _readable(file: Path) -> bool:
    try:
        pq.read_metadata(file)
    except (OSError, pa.ArrowException):
        return False
    return True


def _identity(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(row[name] for name in IDENTITY)


def _finite(value: Any) -> Any:
    """Replaces numbers that JSON does not have by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
