"""Conversations of agents among recorded samples, see `verl_mg.monitor.sample_schema`: one of them, all counts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

COLUMN = "conversation"
TRAJECTORY = ("iteration", "call", "trajectory")
"""Columns that identify a trajectory."""
COUNTS = pa.schema(
    [
        ("iteration", pa.int64()),
        ("call", pa.int32()),
        ("trajectory", pa.int64()),
        ("first_sample", pa.int64()),
        ("agent_turns", pa.int32()),
        ("agent_segments", pa.int32()),
        ("agent_error", pa.string()),
    ]
)
"""A row per conversation: the row of its first segment, numbers of turns and segments, and why the agent failed."""
ADDED = ("segment", "agent_turns", "agent_segments", "agent_error")
"""Columns that `join_counts` adds; null for samples without a conversation."""


def join_counts(rows: pa.Table, files: Iterable[Path]) -> pa.Table:
    """Returns rows of an iteration, whose `files` have the conversations, with the columns `ADDED`, in any order."""
    counts = pa.Table.from_pylist([row for file in files for row in _count(file)], COUNTS)
    # The rows of a trajectory may be on several ranks, each of which then has the conversation.
    merged = counts.group_by(list(TRAJECTORY)).aggregate([(name, "min") for name in COUNTS.names[3:]])
    counts = merged.rename_columns([name.removesuffix("_min") for name in merged.column_names])
    joined = rows.join(counts, keys=list(TRAJECTORY))
    # Segments of a trajectory have consecutive ids.
    joined = joined.append_column("segment", pc.subtract(joined["sample_id"], joined["first_sample"]))
    return joined.drop_columns("first_sample")


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
        for batch in opened.iter_batches(64, columns=[*TRAJECTORY, "sample_id", COLUMN]):
            for row in batch.filter(batch[COLUMN].is_valid()).to_pylist():
                conversation = parse_conversation(row[COLUMN])
                if conversation is not None:
                    yield {name: row[name] for name in TRAJECTORY} | {
                        "first_sample": row["sample_id"],
                        "agent_turns": len(conversation["turns"]),
                        "agent_segments": len(conversation["segments"]),
                        "agent_error": str(conversation["error"]) or None,
                    }
