"""Reading JSON lines of files that another process is still writing: a half-written last line is left for later."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

MOST = 8 * 2**20
"""Bytes that one look at a file reads."""


def parse(line: bytes) -> dict[str, Any] | None:
    """The object of a line, with null for what is not finite; None where the line is damaged."""
    try:
        value = json.loads(line, parse_constant=lambda _: None)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def news(path: Path, file: str, offset: int) -> dict[str, Any]:
    """The whole lines of a file from `offset` on.

    Args:
        file: what the last look called the file. A resumed run puts another in its place, and that is read anew.

    Returns:
        `file`; `begin` and `end`, the bytes that were read; `lines`, their objects; `more`, is there still some left?
    """
    try:
        with path.open("rb") as stream:
            found = os.fstat(stream.fileno())
            name = str(found.st_ino)
            begin = offset if file == name and offset <= found.st_size else 0
            stream.seek(begin)
            whole = _whole_lines(stream, MOST)
    except FileNotFoundError:
        return {"file": "", "begin": 0, "end": 0, "lines": [], "more": False}
    lines = [value for value in map(parse, whole.splitlines()) if value is not None]
    end = begin + len(whole)
    return {"file": name, "begin": begin, "end": end, "lines": lines, "more": len(whole) > 0 and end < found.st_size}


def _whole_lines(stream: BinaryIO, most: int) -> bytes:
    """At least one line, if there is one."""
    text = stream.read(most)
    if b"\n" not in text:
        text += stream.readline()
    return text[: text.rfind(b"\n") + 1]


def line_of(path: Path, key: str, wanted: int) -> dict[str, Any] | None:
    """The line whose `key` is that number, in a file whose lines are sorted by it: few bytes of the file are read."""
    try:
        with path.open("rb") as stream:
            begin, end = 0, stream.seek(0, os.SEEK_END)
            while begin < end:  # the line starts within these
                middle = (begin + end) // 2
                start, line = _first_line_from(stream, middle)
                value = parse(line) if start < end and line.endswith(b"\n") else None
                found = value.get(key) if value else None
                if not isinstance(found, int) or found > wanted:
                    end = middle
                elif found < wanted:
                    begin = start + len(line)
                else:
                    return value
    except FileNotFoundError:
        pass
    return None


def _first_line_from(stream: BinaryIO, offset: int) -> tuple[int, bytes]:
    """Where the first line starts that does so at `offset` or after it, and the line."""
    if offset:
        stream.seek(offset - 1)
        stream.readline()
    else:
        stream.seek(0)
    return stream.tell(), stream.readline()


def ends(path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The first and the last whole line; None where there is none."""
    try:
        with path.open("rb") as stream:
            first = parse(stream.readline())
            size = stream.seek(0, os.SEEK_END)
            back = 2**12
            while True:
                stream.seek(max(0, size - back))
                lines = stream.read(min(back, size)).split(b"\n")[:-1]
                # The first piece may be the end of a line.
                pieces = lines if back >= size else lines[1:]
                last = next((value for value in map(parse, reversed(pieces)) if value), None)
                if last is not None or back >= size:
                    break
                back *= 8
    except FileNotFoundError:
        return None
    return (first, last) if first is not None and last is not None else None
