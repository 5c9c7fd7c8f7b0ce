"""Records of a file, the same ones whatever its format: JSON lines, JSON, Parquet or Arrow.

A value is what JSON has for it. What is missing is absent: a field that is null or NaN, in a mapping of any depth,
since tables give each mapping the fields of all others. In a list it is None.

    {"role": "user", "name": null}      ->  {"role": "user"}
    [1, NaN]                            ->  [1, None]
    timestamp 2026-01-31 12:00          ->  "2026-01-31T12:00:00"
    decimal 7.50                        ->  "7.50", and 7.5 -> 7.5: a number where no digit gets lost
    map {"k": 1}, dictionary, JSON      ->  {"k": 1}, the value, the decoded value

A null that matters, such as an argument of a tool, is kept in a field that is JSON as text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_mg.errors import UserError

if TYPE_CHECKING:
    import pyarrow

Record = dict[str, Any]
FILE_KINDS = (".jsonl", ".json", ".parquet", ".arrow")
ROW_NUMBERS = re.compile(r"__index_level_\d+__")  # columns in which pandas writes the numbers of its rows
OBJECT = 'Write one object per line, like {"prompt": "..."}.'
ARROW_FILE = b"ARROW1"  # first bytes of Arrow's file format, which other libraries than datasets write


def records_of(path: Path) -> Iterator[tuple[int, Record]]:
    """Yields the records of a file of `FILE_KINDS`, each with the number of its line or row, from 1."""
    readers = {".jsonl": _json_lines, ".json": _json_file, ".parquet": _parquet_rows, ".arrow": _arrow_rows}
    yield from readers[path.suffix](path)


def plain(value: Any) -> Any:
    """Returns a value as JSON has it, without what is missing; other objects, such as bytes, are unchanged."""
    if isinstance(value, dict):
        inner = {str(name): plain(item) for name, item in value.items()}
        return {name: item for name, item in inner.items() if item is not None}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str | int):  # before others: most values are
        return value
    if isinstance(value, float):
        return None if value != value else value
    if isinstance(value, Decimal):
        return _number_of(str(value))
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, timedelta | uuid.UUID):
        return str(value)
    return plain(value.tolist()) if hasattr(value, "tolist") else value  # arrays and numbers of numpy


def _number_of(text: str) -> float | int | str:
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if str(number) == text:
            return number
    return text


def _json_lines(path: Path) -> Iterator[tuple[int, Record]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _object(_decoded(line, f"{path}:{number}"), f"{path}:{number}")


def _json_file(path: Path) -> Iterator[tuple[int, Record]]:
    with path.open("rb") as file:
        start = file.read(256).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):
        yield from _json_lines(path)
        return
    for number, value in enumerate(_decoded(path.read_bytes(), str(path)), start=1):
        yield number, _object(value, f"{path}:{number}")


def _decoded(text: bytes, place: str) -> Any:
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_mapping)  # -sig: of a byte order mark
        if b"\\ud" in text.lower():  # an escape may be half a character, which tokenizers reject
            json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise UserError(f"{place}: not UTF-8 text ({error.reason}). Save the file as UTF-8.") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not JSON ({error.msg} at column {error.colno}). {OBJECT}") from error
    except KeyError as error:
        raise UserError(f"{place}: two fields of an object have the name {error}. Rename one of them.") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or as many brackets
        raise UserError(f"{place}: not readable ({error}). Write long numbers as strings, and nest less.") from error
    return value


def _object(value: Any, place: str) -> Record:
    if not isinstance(value, dict):
        raise UserError(f"{place}: a JSON {type(value).__name__}, not an object. {OBJECT}")
    record: Record = plain(value)
    return record


def _mapping(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Returns pairs as a mapping; KeyError for a key that occurs twice, of which Python would keep the last."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        raise KeyError(next(name for name in names if names.count(name) > 1))
    return mapping


def _parquet_rows(path: Path) -> Iterator[tuple[int, Record]]:
    from pyarrow import parquet

    with _readable(path, "Parquet file", "Write it again."), parquet.ParquetFile(path) as file:
        yield from _rows(path, file.schema_arrow, file.iter_batches())


def _arrow_rows(path: Path) -> Iterator[tuple[int, Record]]:
    from pyarrow import ipc, memory_map

    with _readable(path, "Arrow file", "Save the dataset again."), memory_map(str(path)) as file:
        if file.read(len(ARROW_FILE)) == ARROW_FILE:
            whole = ipc.open_file(file)
            yield from _rows(path, whole.schema, map(whole.get_batch, range(whole.num_record_batches)))
        else:
            file.seek(0)
            stream = ipc.open_stream(file)
            yield from _rows(path, stream.schema, stream)


@contextmanager
def _readable(path: Path, kind: str, remedy: str) -> Iterator[None]:
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable {kind} ({str(error).splitlines()[0]}). {remedy}") from error


def _rows(path: Path, schema: pyarrow.Schema, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[tuple[int, Record]]:
    """Yields the rows of a table; an error names the row and the field that cannot be read."""
    names = [name for name in schema.names if not ROW_NUMBERS.fullmatch(name)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{path}: two columns have the name {twice!r}. Rename one of them.")
    decoders = {name: _decoder(schema.field(name).type) for name in names}
    first = 1
    for batch in batches:
        columns = {name: batch.column(name) for name in names}
        values = {name: _values(column, decoders[name], path, name, first) for name, column in columns.items()}
        for row in range(batch.num_rows):
            yield first + row, plain({name: column[row] for name, column in values.items()})
        first += batch.num_rows


def _values(column: Any, decode: Decoder | None, path: Path, name: str, first: int) -> list[Any]:
    def value(item: Any) -> Any:
        return item if item is None or decode is None else decode(item)

    try:
        return [value(item) for item in column.to_pylist()]
    except Exception:  # texts that are no UTF-8, times that Python does not have, keys that occur twice
        for row, scalar in enumerate(column, start=first):
            try:
                value(scalar.as_py())
            except Exception as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise UserError(
                    f"{path}:{row}: the field {name!r} cannot be read ({reason}). Correct it, or leave out the column."
                ) from error
        raise


Decoder = Callable[[Any], Any]


def _decoder(kind: pyarrow.DataType) -> Decoder | None:
    """Returns a function of the values, not None, of a type with maps or JSON in it, which pyarrow gives as others."""
    import pyarrow
    from pyarrow import types

    if isinstance(kind, getattr(pyarrow, "JsonType", ())):
        return json.loads
    if types.is_map(kind):
        item = _decoder(kind.item_type)
        return lambda pairs: _mapping([(str(key), _applied(item, value)) for key, value in pairs])
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _decoder(kind.value_type)
    if types.is_struct(kind):
        inner = {field.name: decode for field in kind if (decode := _decoder(field.type))}
        return (lambda value: {k: _applied(inner.get(k), v) for k, v in value.items()}) if inner else None
    item = _decoder(kind.value_type) if hasattr(kind, "value_type") else None  # of all kinds of lists
    return (lambda values: [_applied(item, value) for value in values]) if item else None


def _applied(decode: Decoder | None, value: Any) -> Any:
    return value if value is None or decode is None else decode(value)
