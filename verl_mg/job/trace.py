"""What the policy wrote, sample by sample, for people to read."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class SampleTrace:
    """One JSON line a sample, in a file of each rank: `folder/rank-{rank}.jsonl`."""

    def __init__(self, folder: str | Path, rank: int) -> None:
        """Goes on after what the file holds; the folder is made."""
        path = Path(folder) / f"rank-{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        """Append the samples of one iteration, on disk when this returns."""
        self._file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        self._file.flush()

    def close(self) -> None:
        """Nothing is written after this."""
        self._file.close()
