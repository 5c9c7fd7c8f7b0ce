"""Rows of an iteration in columns for the index: numbers, names, and texts in lower case; read from the Parquet files.

A row is where `iteration`, `rank` and `row` say, the row's number in the file of the rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

IDENTITY = ("iteration", "call", "sample_id")
NUMBERS = {
    **dict.fromkeys(
        ("iteration", "call", "sample_id", "trajectory", "group", "prompt_id", "policy_version"), pa.int64()
    ),
    "reward": pa.float32(),
    "length": pa.int32(),
    "segment": pa.int64(),
    "agent_turns": pa.int32(),
    "agent_segments": pa.int32(),
    "rank": pa.int32(),
    "row": pa.int32(),
}
"""Columns of numbers; NaN or NOTHING where a row has no value."""
NAMES = ("source", "finish", "agent_error")  # columns of few different texts; null where a row has no value
TEXT = "text"  # prompt and response in lower case, with SEPARATOR between them
SEPARATOR = "\0"
NOTHING = -1
INDEXED = pa.schema(
    [*NUMBERS.items(), *((name, pa.dictionary(pa.int32(), pa.string())) for name in NAMES), (TEXT, pa.string())]
)
EXCERPT = 240  # number of characters of a text in a list
BEFORE = 16  # characters that an excerpt has in front of a text that was searched

_TEXTS = ("prompt", "response")
_STORED = ("iteration", "call", "sample_id", "group", "prompt_id", "policy_version", "reward", "source", "finish")
COLUMN = "conversation"
EPISODE = ("iteration", "call", "episode")  # columns that identify an episode, whose agents have a trajectory each
EPISODES, SEGMENTS = 2**40, 1024
"""A trajectory has the number of its episode modulo EPISODES, a row of agents that of its segment modulo SEGMENTS."""
COUNTS = pa.schema(
    [
        ("iteration", pa.int64()),
        ("call", pa.int32()),
        ("episode", pa.int64()),
        ("agent_turns", pa.int32()),
        ("agent_segments", pa.int32()),
        ("agent_error", pa.string()),
    ]
)
"""A row per conversation: numbers of turns and segments, and why the agent failed."""
ADDED = ("segment", "agent_turns", "agent_segments", "agent_error")
"""Columns that `join_counts` adds; null for samples without a conversation."""


def read_iteration(folder: Path) -> pa.Table:
    """Returns the rows of an iteration with the columns `INDEXED`, each trajectory in one piece by IDENTITY; damaged
    files have none."""
    tables, files, agents = [], [], False
    for file in sorted(folder.glob("rank-*.parquet")):
        try:
            with pq.ParquetFile(file) as opened:
                tables.append(_read(opened, int(file.stem.removeprefix("rank-"))))
                agents = agents or holds_conversation(opened.metadata)
                files.append(file)
        except (OSError, pa.ArrowException):
            continue  # a resumed run replaces its files, and other files are still complete
    if not tables:
        return INDEXED.empty_table()
    table = pa.concat_tables(tables)
    if agents:
        table = join_counts(table, files)
    else:
        for name in ADDED:
            table = table.append_column(name, pa.nulls(len(table), pa.string() if name in NAMES else pa.int64()))
    return _indexed(table.sort_by([(name, "ascending") for name in (*EPISODE, "trajectory", "sample_id")]))


def _read(opened: pq.ParquetFile, rank: int) -> pa.Table:
    known = set(opened.schema_arrow.names)
    names = [name for name in (*_STORED, *_TEXTS, "trajectory", "prompt_length", "loss_mask") if name in known]
    table = opened.read(names, use_threads=False)
    columns = {name: table[name] for name in _STORED}
    columns["trajectory"] = pc.coalesce(table["trajectory"], table["sample_id"]) if "trajectory" in known else None
    if columns["trajectory"] is None:
        columns["trajectory"] = table["sample_id"]
    columns["episode"] = _modulo(columns["trajectory"], EPISODES)
    # The mask is the smallest column with one entry per token.
    columns["length"] = pc.subtract(pc.list_value_length(table["loss_mask"]), table["prompt_length"])
    columns |= {"rank": pa.array([rank] * len(table), pa.int32()), "row": pa.array(range(len(table)), pa.int32())}
    # The separator keeps a search from finding a text that begins in the prompt and ends in the response.
    texts = [pc.utf8_lower(pc.fill_null(table[name].cast(pa.string()), "")) for name in _TEXTS]
    columns[TEXT] = pc.binary_join_element_wise(*texts, SEPARATOR)
    return pa.table(columns)


def _modulo(column: pa.ChunkedArray, divisor: int) -> pa.ChunkedArray:
    return pc.subtract(column, pc.multiply(pc.divide(column, divisor), divisor))


def _indexed(table: pa.Table) -> pa.Table:
    columns = []
    for field in INDEXED:
        column = table[field.name]
        if field.name in NAMES:
            column = column.cast(pa.string()).combine_chunks().dictionary_encode()
        elif field.name in NUMBERS:
            column = pc.fill_null(column.cast(field.type), float("nan") if field.name == "reward" else NOTHING)
        columns.append(column.cast(field.type))
    return pa.table(columns, INDEXED)


def read_excerpts(samples: Path, rows: Sequence[Mapping[str, Any]], terms: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields excerpts around the first of the `terms`, of prompts and responses; nothing where a file was replaced."""
    # By file, so that each is opened once.
    places: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        places.setdefault((row["iteration"], row["rank"]), []).append(row)
    for (iteration, rank), wanted in places.items():
        file = samples / f"{iteration:06d}" / f"rank-{rank}.parquet"
        try:
            with pq.ParquetFile(file) as opened:
                yield from _excerpts(opened, wanted, terms)
        except (OSError, pa.ArrowException):
            continue


def _excerpts(
    opened: pq.ParquetFile, wanted: Sequence[Mapping[str, Any]], terms: Sequence[str]
) -> Iterator[dict[str, Any]]:
    begin = 0
    for group in range(opened.num_row_groups):
        end = begin + opened.metadata.row_group(group).num_rows
        inside = [row for row in wanted if begin <= row["row"] < end]
        if inside:
            table = opened.read_row_group(group, [*IDENTITY, *_TEXTS], use_threads=False)
            for row, stored in zip(inside, table.take([row["row"] - begin for row in inside]).to_pylist(), strict=True):
                if all(row[name] == stored[name] for name in IDENTITY):  # the file may be newer than the index
                    texts = {name: excerpt(stored[name] or "", terms) for name in _TEXTS}
                    yield {name: row[name] for name in IDENTITY} | texts
        begin = end


def excerpt(text: str, terms: Sequence[str]) -> str:
    """Returns the part of a text that a list shows, which begins shortly before the first of the terms."""
    lower = text.lower()
    first = min((place for term in terms if (place := lower.find(term)) >= 0), default=0)
    begin = first - BEFORE if first > 2 * BEFORE else 0
    return ("… " if begin else "") + text[begin : begin + EXCERPT]


def join_counts(rows: pa.Table, files: Iterable[Path]) -> pa.Table:
    """Returns rows of an iteration, whose `files` have the conversations, with the columns `ADDED`, in any order."""
    counts = pa.Table.from_pylist([row for file in files for row in _count(file)], COUNTS)
    # The rows of an episode may be on several ranks, each of which then has the conversation.
    merged = counts.group_by(list(EPISODE)).aggregate([(name, "min") for name in COUNTS.names[3:]])
    counts = merged.rename_columns([name.removesuffix("_min") for name in merged.column_names])
    joined = rows.join(counts, keys=list(EPISODE))
    has_agents = pc.is_valid(joined["agent_turns"])
    return joined.append_column("segment", pc.if_else(has_agents, _modulo(joined["sample_id"], SEGMENTS), None))


def holds_conversation(metadata: pq.FileMetaData) -> bool:
    """Returns whether a file has a conversation; reads only its metadata."""
    if COLUMN not in metadata.schema.to_arrow_schema().names:
        return False
    # A row group lists primitive columns, of which nested ones have several.
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = (group.column(place) for place in range(group.num_columns))
        statistics = next(column.statistics for column in columns if column.path_in_schema == COLUMN)
        if statistics is None or not statistics.has_null_count or statistics.null_count < group.num_rows:
            return True
    return False


def parse_conversation(text: str) -> dict[str, Any] | None:
    """Returns `turns`, `segments`, `log` and `error` of a conversation; None where the text is damaged."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict):
        return None
    complete = {"turns": [], "segments": [], "log": "", "error": ""} | parsed
    lists = [complete["turns"], complete["segments"]]
    if not all(isinstance(item, list) and all(isinstance(entry, dict) for entry in item) for item in lists):
        return None
    return complete


def _count(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of `COUNTS` of a file."""
    with pq.ParquetFile(file) as opened:
        if not holds_conversation(opened.metadata):
            return
        # In small batches: each conversation is a text that may be as long as a trajectory.
        for batch in opened.iter_batches(64, columns=["iteration", "call", "trajectory", COLUMN]):
            for row in batch.filter(batch[COLUMN].is_valid()).to_pylist():
                conversation = parse_conversation(row[COLUMN])
                if conversation is not None:
                    yield {
                        "iteration": row["iteration"],
                        "call": row["call"],
                        "episode": row["trajectory"] % EPISODES,
                        "agent_turns": len(conversation["turns"]),
                        "agent_segments": len(conversation["segments"]),
                        "agent_error": str(conversation["error"]) or None,
                    }
