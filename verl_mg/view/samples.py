"""Samples of a run, from the Parquet files of its ranks. Filters are pushed down; texts are read last."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from verl_mg.view.conversations import (
    ADDED,
    COLUMN,
    TRAJECTORY,
    ConversationCounts,
    has_conversations,
    parse_conversation,
)

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
"""Columns used by searches; a sample has more, see `Samples.get`. Files of earlier runs have no trajectory."""
IDENTITY = ("iteration", "call", "sample_id")
BRIEF = (*IDENTITY, "trajectory", "group", "prompt_id", "policy_version", "source", "finish", "reward", "length")
SORTABLE = (*BRIEF, "agent_turns", "agent_segments")
FAILED, COMPLETED = "failed", "completed"
AGENT_OUTCOMES = (FAILED, COMPLETED)
EXCERPT = 240
"""Number of characters of a text in a list."""


@dataclass(frozen=True)
class Query:
    """Selection and order of samples; a field that is None matches all."""

    first: int | None = None
    """First iteration."""
    last: int | None = None
    """Last iteration."""
    call: int | None = None
    """Call of the rollout within the iteration."""
    group: int | None = None
    """Group of the sample."""
    prompt_id: int | None = None
    """Id of the prompt."""
    reward_from: float | None = None
    """Smallest reward."""
    reward_to: float | None = None
    """Largest reward."""
    length_from: int | None = None
    """Smallest number of response tokens."""
    length_to: int | None = None
    """Largest number of response tokens."""
    finish: str | None = None
    """Finish reason."""
    source: str | None = None
    """Source of the prompt."""
    text: str | None = None
    """Text in prompt or response; upper and lower case are equal."""
    turns_from: int | None = None
    """Smallest number of turns of an agent's conversation."""
    turns_to: int | None = None
    """Largest number of turns of an agent's conversation."""
    agent: str | None = None
    """Outcome of the agent, one of `AGENT_OUTCOMES`."""
    trajectories: bool = False
    """Whether to return only the first matching row of each trajectory."""
    sort: str = "sample_id"
    """Column to sort by."""
    descending: bool = False
    """Whether to sort in descending order."""
    offset: int = 0
    """Number of rows to skip."""
    limit: int = 50
    """Largest number of rows."""

    def filter(self) -> pc.Expression | None:
        """Returns the filter of rows, without iterations, which are selected by folder."""
        field, length = pc.field, _length()
        conditions: list[pc.Expression] = [
            field(name) == value
            for name in ("call", "group", "prompt_id", "finish", "source")
            if (value := getattr(self, name)) is not None
        ]
        for bound, column in (("reward", field("reward")), ("length", length)):
            if (low := getattr(self, f"{bound}_from")) is not None:
                conditions.append(column >= low)
            if (high := getattr(self, f"{bound}_to")) is not None:
                conditions.append(column <= high)
        if self.text:
            conditions.append(_holds("prompt", self.text) | _holds("response", self.text))
        whole = None
        for condition in conditions:
            whole = condition if whole is None else whole & condition
        return whole

    def needs_conversations(self) -> bool:
        """Returns whether `filter_conversations` or the order need the columns `ADDED`."""
        return self.sort in ADDED or any(value is not None for value in (self.turns_from, self.turns_to, self.agent))

    def filter_conversations(self, rows: pa.Table) -> pa.Table:
        """Returns the matching rows of a table with the columns `ADDED`."""
        turns, error = pc.field("agent_turns"), pc.field("agent_error")
        if self.turns_from is not None:
            rows = rows.filter(turns >= self.turns_from)
        if self.turns_to is not None:
            rows = rows.filter(turns <= self.turns_to)
        if self.agent is not None:
            rows = rows.filter(turns.is_valid() & (error.is_valid() if self.agent == FAILED else error.is_null()))
        return rows


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


def _holds(column: str, text: str) -> pc.Expression:
    return pc.match_substring(pc.field(column), text, ignore_case=True)


class Samples:
    """Samples in a folder `samples/`, which may not exist yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counts = ConversationCounts()

    def iterations(self) -> list[int]:
        """Returns the iterations with samples, in order."""
        try:
            return sorted(int(entry.name) for entry in self._folder.iterdir() if entry.name.isdecimal())
        except FileNotFoundError:
            return []

    def facets(self, first: int | None, last: int | None) -> dict[str, Any]:
        """Returns the sources and finish reasons of a range of iterations, and whether the last has conversations.

        Args:
            first: first iteration; None for the first of all.
            last: last iteration; None for the last of all.
        """
        table = self._scan(first, last, _columns(("source", "finish")), None)
        texts = {name: sorted(filter(None, table[name].unique().to_pylist())) for name in ("source", "finish")}
        newest = [item for item in self.iterations() if last is None or item <= last][-1:]
        return texts | {"agents": any(has_conversations(self._files(item, item)) for item in newest)}

    def find(self, query: Query) -> dict[str, Any]:
        """Returns `total`, the number of matching samples, and `rows`, the requested page with excerpts of texts."""
        stored = (*IDENTITY, "trajectory", *([] if query.sort in ADDED else [query.sort]))
        table = self._scan(query.first, query.last, _columns(dict.fromkeys(stored)), query.filter())
        if query.needs_conversations():
            files = self._files(query.first, query.last)
            table = query.filter_conversations(self._counts.join(table, files))
        if query.trajectories:
            table = _first_of_each(table)
        order = "descending" if query.descending else "ascending"
        keys = [(query.sort, order), *((name, order) for name in IDENTITY if name != query.sort)]
        page = table.sort_by(keys).slice(query.offset, query.limit).to_pylist()
        excerpts = self._excerpts(page)
        return {
            "total": table.num_rows,
            "rows": [excerpts[_identity(row)] for row in page if _identity(row) in excerpts],
        }

    def prompts(self, iteration: int) -> list[dict[str, Any]]:
        """Returns the prompts of an iteration: id and text, number of samples, mean reward, mean length.

        A trajectory counts once, by its first segment.
        """
        columns = _columns((*IDENTITY, "trajectory", "prompt_id", "reward", "length")) | {"prompt": _excerpt("prompt")}
        table = _first_of_each(self._scan(iteration, iteration, columns, None))
        grouped = table.group_by("prompt_id", use_threads=False).aggregate(
            [("prompt", "first"), ("prompt", "count"), ("reward", "mean"), ("length", "mean")]
        )
        names = {"prompt_first": "prompt", "prompt_count": "samples", "reward_mean": "reward", "length_mean": "length"}
        renamed = grouped.rename_columns([names.get(name, name) for name in grouped.column_names])
        return [_finite(row) for row in renamed.sort_by("prompt_id").to_pylist()]

    def get(self, iteration: int, call: int, sample_id: int) -> dict[str, Any] | None:
        """Returns a sample with all columns but its conversation; None where there is no such sample.

        Args:
            iteration: its iteration.
            call: its call of the rollout in the iteration.
            sample_id: its id.
        """
        return self._row(iteration, call, sample_id, lambda field: field.name != COLUMN)

    def conversation(self, iteration: int, call: int, sample_id: int) -> dict[str, Any] | None:
        """Returns a sample without its token columns, and the conversation of its trajectory; None without one.

        Args:
            iteration: its iteration.
            call: its call of the rollout in the iteration.
            sample_id: its id.

        Returns:
            `sample`; `conversation`: `turns`, `segments`, `log`, `error`; `rows`: the recorded rows of the trajectory.
        """
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

    def _excerpts(self, page: Sequence[dict[str, Any]]) -> dict[tuple[int, ...], dict[str, Any]]:
        """Returns the list entries of samples by iteration, call and id."""
        entries: dict[tuple[int, ...], dict[str, Any]] = {}
        for iteration in {row["iteration"] for row in page}:
            ids = [row["sample_id"] for row in page if row["iteration"] == iteration]
            table = self._listed(iteration, pc.field("sample_id").isin(ids))
            entries |= {_identity(row): _finite(row) for row in table.to_pylist()}
        return entries

    def _listed(self, iteration: int, condition: pc.Expression) -> pa.Table:
        """Returns rows of an iteration with what a list shows of them, in any order."""
        columns = _columns(BRIEF) | {name: _excerpt(name) for name in ("prompt", "response")}
        table = self._scan(iteration, iteration, columns, condition)
        return self._counts.join(table, self._files(iteration, iteration))

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
        for iteration in self.iterations():
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
