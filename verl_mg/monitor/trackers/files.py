"""Files of our own: metrics.jsonl and the table of evaluations."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from verl_mg.jsonl import keep_before


class JsonlTracker:
    """One line a step: `{"step": 3, "reward/mean": 0.25, ...}`.

    Floats are written with all their digits, so two files compare bit for bit; what is not finite is null.
    """

    def __init__(self, path: str | Path, first_step: int | None = None) -> None:
        """Goes on after what the file holds, without a last line that a killed run left half written.

        path: the file; its folder is made.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            keep_before(path, "step", first_step)
        # Without a buffer, a line that the disk has no room for is not written a second time later on.
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        line = {"step": step} | {name: _finite_or_none(value) for name, value in metrics.items()}
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        written = self._file.write(data)
        if written < len(data):
            self._file.truncate(self._file.tell() - written)
            raise OSError("no room left for a line")

    def close(self) -> None:
        self._file.close()


class EvaluationTable:
    """`| iteration | reward | pass@4 | ...`: a row for each evaluation, with the columns of the first one."""

    def __init__(self, path: str | Path, first_step: int | None = None) -> None:
        """Begins anew where the file is there and no `first_step` says that the run goes on."""
        self._path = Path(path)
        self._columns: list[str] = []
        if first_step is not None and self._path.exists():
            head, rule, *rows = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
            self._columns = _cells(head)[1:]
            kept = [row for row in rows if row.endswith("\n") and int(_cells(row)[0]) < first_step]
            shorter = self._path.with_name(self._path.name + ".new")
            shorter.write_text("".join([head, rule, *kept]), encoding="utf-8")
            os.replace(shorter, self._path)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        told = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
        if not told:
            return
        columns = self._columns or list(told)
        row = [str(step), *(f"{told[name]:.4f}" if name in told else "" for name in columns)]
        head = [] if self._columns else [["iteration", *columns], ["---:"] * (len(columns) + 1)]
        with self._path.open("w" if head else "a", encoding="utf-8") as file:
            file.writelines(f"| {' | '.join(cells)} |\n" for cells in [*head, row])
        self._columns = columns

    def close(self) -> None:
        pass


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def _finite_or_none(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
