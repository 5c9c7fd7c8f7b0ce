"""Files of JSON lines, one an iteration: a run appends to them, a resumed one first takes out what it does again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The object of each line, but for a last one that is half written; [] where there is no file."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def keep_before(file: Path, key: str, first: int | None) -> None:
    """Take out the lines whose `key` is `first` or more, and a last line that a killed run left half written.

    The file is replaced in one piece; every line stays as it was written.
    """
    shorter = file.with_name(file.name + ".new")
    with file.open(encoding="utf-8") as old, shorter.open("w", encoding="utf-8") as new:
        for line in old:
            if line.endswith("\n") and (first is None or json.loads(line)[key] < first):
                new.write(line)
    os.replace(shorter, file)
