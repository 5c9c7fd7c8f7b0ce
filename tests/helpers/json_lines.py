"""Files of one JSON object a line."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_lines(file: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def data_file(folder: Path, *records: Mapping[str, Any]) -> Path:
    return write_lines(folder / "data.jsonl", records)


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
