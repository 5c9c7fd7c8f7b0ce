"""Files that another process reads, also while they are written: replaced as a whole, lines or records of JSON.

A run appends lines, a resumed one removes some. A last line without a line break is incomplete, and ignored until it is
complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from verl_mg.errors import UserError

MAX_READ_BYTES = 8 * 2**20  # largest number of bytes that `read_new_lines` reads


class StoredRecord(BaseModel):
    """JSON object of a file that another process reads back: typed and immutable, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def parse(cls, text: str | bytes, place: Path | str, remedy: str) -> Self:
        """Returns the record in a text; a UserError names the first wrong field at `place` and ends with `remedy`."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"])) or "the text"
            reason = problem["msg"].removeprefix("Value error, ")
            raise UserError(f"{place}: {where}: {reason}{remedy}") from None


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yields the hidden path of a new file, which becomes `file` at the end: no reader ever sees a part of it."""
    # In the same folder, since a rename is atomic only within a file system; writers look at the suffix.
    partial = file.with_name(f".{os.getpid()}.{file.name}")
    try:
        yield partial
        os.replace(partial, file)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Returns the objects of all complete lines; [] where the file does not exist."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def keep_before(file: Path, key: str, first: int | None) -> None:
    """Removes lines whose `key` is `first` or more, and an incomplete last line; replaces the file atomically."""
    # A new file: a process that reads the old one has its lines to the end, and sees by the inode that it is replaced.
    with replacing(file) as shorter, file.open(encoding="utf-8") as old, shorter.open("w", encoding="utf-8") as new:
        for line in old:
            if line.endswith("\n") and (first is None or json.loads(line)[key] < first):
                new.write(line)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Parses a line, with None for numbers that are not finite; returns None for a damaged line."""
    # Python's reader accepts NaN, but what is read here is sent to browsers, whose JSON has no such number.
    try:
        value = json.loads(line, parse_constant=lambda _: None)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_new_lines(path: Path, file: str, offset: int) -> dict[str, Any]:
    """Reads the complete lines of a file from an offset on.

    `file` and `offset` are `file` and `end` of the last result: the file's id and the bytes read so far. A file that
    was replaced is read from its beginning. The other results: `begin`, `lines`, and whether `more` follow now.
    """
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            name = str(status.st_ino)
            begin = offset if file == name and offset <= status.st_size else 0
            stream.seek(begin)
            text = stream.read(MAX_READ_BYTES)
            if b"\n" not in text:  # at least one line where there is one
                text += stream.readline()
            whole = text[: text.rfind(b"\n") + 1]
    except FileNotFoundError:
        return {"file": "", "begin": 0, "end": 0, "lines": [], "more": False}
    lines = [value for value in map(parse_line, whole.splitlines()) if value is not None]
    end = begin + len(whole)
    return {"file": name, "begin": begin, "end": end, "lines": lines, "more": len(whole) > 0 and end < status.st_size}


def find_line(path: Path, key: str, number: int) -> dict[str, Any] | None:
    """Finds the line whose `key` is a number by binary search, in a file sorted by it; None where there is none."""
    try:
        with path.open("rb") as stream:
            begin, end = 0, stream.seek(0, os.SEEK_END)
            while begin < end:  # the line starts in this range
                middle = (begin + end) // 2
                start, line = _first_line_from(stream, middle)
                value = parse_line(line) if start < end and line.endswith(b"\n") else None
                current = value.get(key) if value else None
                if not isinstance(current, int) or current > number:
                    end = middle
                elif current < number:
                    begin = start + len(line)
                else:
                    return value
    except FileNotFoundError:
        pass
    return None


def _first_line_from(stream: BinaryIO, offset: int) -> tuple[int, bytes]:
    """Returns the start of the first line that starts at `offset` or later, and the line."""
    if offset:
        stream.seek(offset - 1)
        stream.readline()
    else:
        stream.seek(0)
    return stream.tell(), stream.readline()


def first_and_last(path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns the first and the last complete line; None where there is none."""
    try:
        with path.open("rb") as stream:
            first = parse_line(stream.readline())
            size = stream.seek(0, os.SEEK_END)
            back = 2**12
            while True:
                stream.seek(max(0, size - back))
                lines = stream.read(min(back, size)).split(b"\n")[:-1]
                # The first piece may be the end of a line.
                pieces = lines if back >= size else lines[1:]
                last = next((value for value in map(parse_line, reversed(pieces)) if value), None)
                if last is not None or back >= size:
                    break
                back *= 8
    except FileNotFoundError:
        return None
    return (first, last) if first is not None and last is not None else None
