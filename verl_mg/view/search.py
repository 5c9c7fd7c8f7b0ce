"""Searches of samples: the rows that match a query, and pages of them.

    Query --> rows by numbers and names: one pass over the mapped columns of each segment
          --> texts: signatures (which blocks may match) --> rows of these blocks --> blocks are read, step by step

A request reads blocks for a limited time and shows the matches so far; the next one continues with the same `Search`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl_mg.view.rows import EPISODES, NAMES, NOTHING, NUMBERS
from verl_mg.view.segments import Segment

FAILED, COMPLETED = "failed", "completed"
AGENT_OUTCOMES = (FAILED, COMPLETED)
SORTABLE = (*(name for name in NUMBERS if name not in ("rank", "row", "segment")), "source", "finish")
OPTIONAL = ("segment", "agent_turns", "agent_segments")  # columns that are NOTHING for samples without an agent
_PAGING = ("sort", "descending", "offset", "limit")


@dataclass(frozen=True)
class Query:
    """Selection and order of samples; a field that is None matches all. `first` and `last` are iterations."""

    first: int | None = None
    last: int | None = None
    call: int | None = None  # call of the rollout within the iteration
    group: int | None = None
    prompt_id: int | None = None
    trajectory: int | None = None
    episode: int | None = None  # all trajectories of an episode
    reward_from: float | None = None
    reward_to: float | None = None
    length_from: int | None = None  # smallest number of response tokens
    length_to: int | None = None
    finish: str | None = None
    source: str | None = None
    text: str | None = None  # text in prompt or response; upper and lower case are equal
    words: bool = False  # whether the parts of `text` between spaces are searched each for itself; all must occur
    turns_from: int | None = None  # smallest number of turns of an agent's conversation
    turns_to: int | None = None
    agent: str | None = None  # outcome of the agent, one of `AGENT_OUTCOMES`
    trajectories: bool = False  # whether to return only the first matching row of each trajectory
    sort: str = "sample_id"
    descending: bool = False
    offset: int = 0
    limit: int = 50

    def terms(self) -> list[str]:
        """Returns the texts that must occur, in lower case as the index has them."""
        text = pc.utf8_lower(pa.scalar(self.text or "")).as_py()
        return text.split() if self.words else [text] if text else []

    def selection(self) -> tuple[Any, ...]:
        """Returns the fields that select rows, without their order and page."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name not in _PAGING)

    def rows(self, segment: Segment) -> np.ndarray | None:
        """Returns the rows of a segment that match everything but the text, in order; None for all."""
        conditions: list[np.ndarray] = []
        for bound, name in (("", "iteration"), ("reward", "reward"), ("length", "length"), ("turns", "agent_turns")):
            low, high = (
                (getattr(self, f"{bound}_{end}") for end in ("from", "to")) if bound else (self.first, self.last)
            )
            if name == "iteration" and _covers(segment, low, high):
                continue
            if low is not None:
                conditions.append(segment.column(name) >= low)
            if high is not None:
                conditions.append(segment.column(name) <= high)
            # NOTHING is -1: without a lower bound, samples without an agent would match.
            if name == "agent_turns" and not low and high is not None:
                conditions.append(segment.column(name) != NOTHING)
        for name in ("call", "group", "prompt_id", "trajectory"):
            if (value := getattr(self, name)) is not None:
                conditions.append(segment.column(name) == value)
        if self.episode is not None:
            conditions.append(segment.column("trajectory") % EPISODES == self.episode)
        for name in ("finish", "source"):
            if (value := getattr(self, name)) is not None:
                names = segment.names(name)
                # The number of names is the place of none: no row matches a name that the segment does not have.
                conditions.append(segment.column(name) == (names.index(value) if value in names else len(names)))
        if self.agent is not None:
            failed = segment.column("agent_error") >= 0
            conditions += [segment.column("agent_turns") != NOTHING, failed if self.agent == FAILED else ~failed]
        return np.flatnonzero(np.logical_and.reduce(conditions)).astype(np.int32) if conditions else None


def _covers(segment: Segment, first: int | None, last: int | None) -> bool:
    return (first is None or first <= segment.first) and (last is None or last >= segment.last)


class Search:
    """The rows of some segments that match a query; those with a text are found step by step."""

    def __init__(self, segments: Sequence[Segment], query: Query) -> None:
        self.segments, self._query = segments, query
        self.terms = query.terms()
        # With a text nothing matches until its blocks have been read.
        self._matches = [np.zeros(0, np.int32) if self.terms else query.rows(item) for item in segments]
        self._reading: tuple[int, list[int]] = -1, []
        self._steps = self._read_texts() if self.terms else iter(())
        self.share = 0.0 if self.terms else 1.0  # share of the segments whose texts have been read

    def advance(self, seconds: float) -> None:
        """Reads texts for about `seconds`, or until all have been read."""
        deadline = time.monotonic() + seconds
        for _ in self._steps:
            if time.monotonic() > deadline:
                return
        self.share = 1.0

    def _read_texts(self) -> Iterator[None]:
        """Finds the rows with the terms; yields after each block."""
        terms = [term.encode() for term in self.terms]
        for number in range(len(self.segments)):
            # The end of the list that is shown first comes first.
            place = len(self.segments) - 1 - number if self._query.descending else number
            segment = self.segments[place]
            self._reading = place, []
            # The signatures first: most segments have no block with a rare text, and their columns are not read.
            blocks = segment.blocks_with(terms, None)
            rows = self._query.rows(segment) if len(blocks) else None
            selected = np.ones(len(segment), bool)
            if rows is not None:
                selected[:] = False
                selected[rows] = True
                blocks = segment.blocks_with(terms, rows)
            for done, block in enumerate(blocks[::-1] if self._query.descending else blocks):
                self._reading[1].extend(row for row in segment.rows_with(int(block), terms) if selected[row])
                self.share = (number + (done + 1) / len(blocks)) / len(self.segments)
                yield
            self._matches[place] = np.sort(np.asarray(self._reading[1], np.int32))

    def rows(self) -> list[dict[str, Any]]:
        """Returns all matching rows so far, with all columns."""
        matches = zip(self.segments, map(self._of, range(len(self.segments))), strict=True)
        tables = (segment.rows if rows is None else segment.rows.take(rows) for segment, rows in matches)
        return [row for table in tables for row in _entries(table)]

    def page(self, query: Query) -> tuple[int, list[dict[str, Any]]]:
        """Returns the number of matching rows so far, and the page of them that `query` selects, with all columns."""
        matches = [self._of(place) for place in range(len(self.segments))]
        counts = [len(item) if rows is None else len(rows) for item, rows in zip(self.segments, matches, strict=True)]
        bounds = np.cumsum([0, *counts])
        chosen = _page(self._key(query.sort, matches), query.descending, query.offset, query.limit)
        entries = []
        for position in chosen.tolist():
            place = int(np.searchsorted(bounds, position, side="right")) - 1
            rows, offset = matches[place], position - int(bounds[place])
            row = offset if rows is None else int(rows[offset])
            entries += _entries(self.segments[place].rows.slice(row, 1))
        return int(bounds[-1]), entries

    def _of(self, place: int) -> np.ndarray | None:
        reading, read = self._reading
        rows = np.sort(np.asarray(read, np.int32)) if place == reading else self._matches[place]
        if not self._query.trajectories:
            return rows
        segment = self.segments[place]
        rows = np.arange(len(segment)) if rows is None else rows
        # Rows of a trajectory follow each other.
        new = np.zeros(len(rows), bool)
        new[:1] = True
        for name in ("iteration", "call", "trajectory"):
            column = segment.column(name)[rows]
            new[1:] |= column[1:] != column[:-1]
        return rows[new]

    def _key(self, name: str, matches: Sequence[np.ndarray | None]) -> np.ndarray:
        """Returns the values that rows are sorted by."""
        columns = []
        order: dict[str, int] = {}
        if name in NAMES:
            order = {text: i for i, text in enumerate(sorted({t for item in self.segments for t in item.names(name)}))}
        for segment, rows in zip(self.segments, matches, strict=True):
            column = segment.column(name)
            column = column if rows is None else column[rows]
            if name in NAMES:
                column = np.array([*(order[text] for text in segment.names(name)), NOTHING])[column]
            if name in (*NAMES, *OPTIONAL):
                column = np.where(column == NOTHING, np.nan, column)  # missing ones are last in any order
            columns.append(column)
        return np.concatenate(columns) if columns else np.zeros(0, np.int64)


def _page(key: np.ndarray, descending: bool, offset: int, limit: int) -> np.ndarray:
    """Returns the positions of a page of a sorted list; equal ones keep their order, missing ones (NaN) are last."""
    # Without sorting the list, of which 10 million values take ten times as long: a partition finds the first and the
    # last value of the page, and those between are sorted. 5 3 9 1 7, offset 1, limit 2, ascending: values 3 5 at 1 0.
    end = min(offset + limit, len(key))
    if offset >= end:
        return np.zeros(0, np.int64)
    if descending:  # equal ones are in reverse order then
        return len(key) - 1 - _page(-key[::-1], False, offset, limit)
    if (key[1:] >= key[:-1]).all():
        return np.arange(offset, end)
    ends = np.partition(key, (offset, end - 1))
    low, high = ends[offset], ends[end - 1]
    below = int((key < low).sum())
    if np.isnan(low):  # they are equal to nothing
        return np.flatnonzero(np.isnan(key))[offset - int((~np.isnan(key)).sum()) :][: end - offset]
    within = (key > low) & ~(key >= high) if not np.isnan(high) else key > low
    middle = np.flatnonzero(within)
    middle = middle[np.argsort(key[middle], kind="stable")]
    parts = [np.flatnonzero(key == low), middle]
    if high != low:
        parts.append(np.flatnonzero(key == high) if not np.isnan(high) else np.flatnonzero(np.isnan(key)))
    return np.concatenate(parts)[offset - below : end - below]


def _entries(rows: pa.Table) -> list[dict[str, Any]]:
    """Returns rows with the columns of the index, None where a row has no value."""
    return [row | {name: None for name in OPTIONAL if row[name] == NOTHING} for row in rows.to_pylist()]
