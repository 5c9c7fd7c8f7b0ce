"""Samples of a run: lists by the index, single samples and conversations from the Parquet files of the ranks."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verl_mg.view.index import SampleIndex
from verl_mg.view.rows import ADDED, COLUMN, IDENTITY, NOTHING, SEGMENTS, parse_conversation, read_excerpts
from verl_mg.view.search import Query, Search

BRIEF = (*IDENTITY, "trajectory", "group", "prompt_id", "policy_version", "source", "finish", "reward", "length")
# Seconds that a request searches texts; the next one continues.
SEARCH_SECONDS = 0.5
# Searches that are kept, for further pages of them. One that matches 10 million samples has 40 MB.
SEARCHES = 4


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
        progress = self.index.progress(search.segments, query.first, query.last)
        listed = self._listed(page, search.terms)
        return {"total": total, "rows": listed, "share": search.share, "index": progress}

    def _listed(self, rows: Sequence[dict[str, Any]], terms: Sequence[str]) -> list[dict[str, Any]]:
        """Returns rows of the index as a list shows them, with excerpts; none where a file was replaced."""
        texts = {_identity(row): row for row in read_excerpts(self._folder, rows, terms)}
        known = (row for row in rows if _identity(row) in texts)
        return [_finite({name: row[name] for name in (*BRIEF, *ADDED)} | texts[_identity(row)]) for row in known]

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
        query = Query(first=iteration, last=iteration, trajectories=True)
        rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for row in Search(self.index.segments(iteration, iteration), query).rows():
            rows[row["prompt_id"]].append(row)
        prompts = []
        for first in self._listed([same[0] for _, same in sorted(rows.items())], ()):
            same = rows[first["prompt_id"]]
            means = {name: _mean(row[name] for row in same) for name in ("reward", "length")}
            prompts.append({name: first[name] for name in ("prompt_id", "prompt")} | {"samples": len(same)} | means)
        return prompts

    def get(self, iteration: int, call: int, sample_id: int) -> dict[str, Any] | None:
        """Returns a sample with all columns but its conversation; None where there is no such sample."""
        return self._row(iteration, call, sample_id, lambda field: field.name != COLUMN)

    def conversation(self, iteration: int, call: int, sample_id: int) -> dict[str, Any] | None:
        """Returns a sample without its token columns, its episode's conversation, or None, and the rows of it."""
        # A row has hundreds of thousands of tokens, which the conversation does not need.
        sample = self._row(iteration, call, sample_id, lambda f: f.name != COLUMN and not pa.types.is_list(f.type))
        if sample is None:
            return None
        first = sample_id - sample_id % SEGMENTS  # of the rows of its episode, where it is one of agents
        of_episode = (pc.field("sample_id") >= first) & (pc.field("sample_id") < first + SEGMENTS)
        selected = (pc.field("call") == call) & of_episode & pc.field(COLUMN).is_valid()
        texts = self._rows(iteration, selected, lambda f: f.name == COLUMN)
        conversation = next((parse_conversation(row[COLUMN]) for row in texts), None)
        if conversation is None:
            return None
        query = Query(first=iteration, last=iteration, call=call, episode=first // SEGMENTS)
        rows = Search(self.index.segments(iteration, iteration), query).rows()
        return {"sample": sample, "conversation": _finite(conversation), "rows": self._listed(rows, ())}

    def _row(
        self, iteration: int, call: int, sample_id: int, wanted: Callable[[pa.Field], bool]
    ) -> dict[str, Any] | None:
        selected = (pc.field("call") == call) & (pc.field("sample_id") == sample_id)
        row = next(self._rows(iteration, selected, wanted), None)
        return row and _finite(row | {"parts": dict(row.get("parts") or ())})

    def _rows(
        self, iteration: int, selected: pc.Expression, wanted: Callable[[pa.Field], bool]
    ) -> Iterator[dict[str, Any]]:
        """Yields rows of an iteration's files; damaged ones have none, and a resumed run replaces its files."""
        for file in filter(_readable, sorted((self._folder / f"{iteration:06d}").glob("rank-*.parquet"))):
            # Files without agents have no conversations.
            if columns := [field.name for field in pq.read_schema(file) if wanted(field)]:
                yield from pq.read_table(file, columns=columns, filters=selected).to_pylist()


def _readable(file: Path) -> bool:
    try:
        pq.read_metadata(file)
    except (OSError, pa.ArrowException):
        return False
    return True


def _identity(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(row[name] for name in IDENTITY)


def _mean(values: Iterable[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return fmean(known) if known else None


def _finite(value: Any) -> Any:
    """Replaces numbers that JSON does not have by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
