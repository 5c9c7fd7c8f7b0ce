"""Reading data files into plain records."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_mg.data.folders import data_files
from verl_mg.errors import UserError

Record = dict[str, Any]


def read_records(path: str | Path) -> list[Record]:
    """The records of a data file or folder, in the order of files and lines.

    Args:
        path: `.jsonl` or `.json` (one JSON object a line; blank lines are skipped), `.parquet`, `.arrow` (a stream),
            or what else `data_files` knows: a folder of shards, a pattern, a dataset saved by Hugging Face's.

    Raises:
        UserError: the file is missing, empty, of another kind, or a line is not a JSON object.
    """
    return [record for _, record in located_records(path)]


def located_records(path: str | Path) -> list[tuple[str, Record]]:
    """The records of `path`, each after its place `file:line` (for Parquet and Arrow, `file:row`), from 1.

    Raises:
        UserError: as `read_records`.
    """
    readers = {".jsonl": _json_lines, ".json": _json_lines, ".parquet": _parquet_rows, ".arrow": _arrow_rows}
    files = data_files(Path(path))
    records = [(f"{file}:{line}", record) for file in files for line, record in readers[file.suffix](file)]
    if not records:
        raise UserError(f"{path}: no records in it; write one JSON object a line, or one row a prompt")
    return records


def _json_lines(path: Path) -> Iterator[tuple[int, Record]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _json_object(line, f"{path}:{number}")


def _json_object(line: bytes, place: str) -> Record:
    try:
        record = json.loads(line.decode("utf-8-sig"))
        if b"\\ud" in line.lower():  # an escape may be half a character, which no tokenizer takes
            json.dumps(record, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise UserError(f"{place}: not UTF-8 text ({error.reason}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{place}: not JSON ({error.msg} at column {error.colno}); "
            'write one object a line, like {"prompt": "..."}'
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or as many brackets
        raise UserError(f"{place}: not readable ({error}); write long numbers as strings, and nest less") from error
    if not isinstance(record, dict):
        raise UserError(
            f'{place}: a JSON {type(record).__name__}, not an object; write one object a line, like {{"prompt": "..."}}'
        )
    return record


def _parquet_rows(path: Path) -> Iterator[tuple[int, Record]]:
    from pyarrow import ArrowException, parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError, ValueError, OverflowError) as error:  # the last two of texts and dates
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a readable Parquet file ({reason}); write it anew") from error
    yield from enumerate(rows, start=1)


def _arrow_rows(path: Path) -> Iterator[tuple[int, Record]]:
    from pyarrow import ArrowException, ipc, memory_map

    try:
        with memory_map(str(path)) as file, ipc.open_stream(file) as stream:
            rows = stream.read_all().to_pylist()
    except (ArrowException, OSError, ValueError, OverflowError) as error:  # the last two of texts and dates
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a readable Arrow stream ({reason}); save the dataset anew") from error
    yield from enumerate(rows, start=1)
