"""Compares the metrics of two runs, bitwise.

    python -m tools.compare_metrics OLD NEW [--renames FILE] [--rel 1e-4] [--only GLOB]

OLD and NEW are files metrics.jsonl, or folders of runs: files with the same path below both folders are compared. FILE
has a line `old-name new-name` for each metric that was renamed; a name that ends with * renames all that begin so.
Metrics that depend on the machine or on which engine was faster are ignored. Prints a line per run and the first
differences of those that differ; exit code 1 if there is any difference.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

METRICS = "metrics.jsonl"
MACHINE_DEPENDENT = ("time/", "rollout/load_imbalance", "rollout/busiest_engine", "rollout/engine_deaths", "memory/")
SHOWN = 5
"""Number of differences that are printed for a run."""

Lines = list[dict[str, float | None]]


def main() -> None:
    """Prints the comparison of two runs."""
    options = _options()
    renames = read_renames(options.renames) if options.renames else {}
    old, new = metric_files(options.old, options.only), metric_files(options.new, options.only)
    differs = not old
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            print(f"{name}: only in {options.old if name in old else options.new}")
            differs = True
            continue
        before, after = read_metrics(old[name], renames), read_metrics(new[name])
        differences = list(compare(before, after, options.rel))
        print(f"{name}: {len(after)} iterations, {_verdict(before, differences)}")
        for line in differences[:SHOWN]:
            print(f"    {line}")
        differs |= bool(differences)
    sys.exit(int(differs))


def _verdict(lines: Lines, differences: list[str]) -> str:
    if differences:
        return f"{len(differences)} differences"
    names = {name for line in lines for name in line}
    return f"{len(names)} metrics are equal"


def metric_files(path: Path, pattern: str = "*") -> dict[str, Path]:
    """Returns the metrics files at or below a path by the name of their run."""
    if path.is_file():
        return {METRICS: path}
    files = {str(file.parent.relative_to(path)): file for file in path.rglob(METRICS)}
    return {name: file for name, file in files.items() if fnmatch(name, pattern)}


def read_renames(file: Path) -> dict[str, str]:
    """Returns new names by old names of the lines `old new` of a file."""
    pairs = (line.split() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    return {old: new for old, new in pairs}


def renamed(name: str, renames: Mapping[str, str]) -> str:
    """Returns the new name of a metric."""
    if name in renames:
        return renames[name]
    for old, new in renames.items():
        if old.endswith("*") and name.startswith(old[:-1]):
            return new.removesuffix("*") + name[len(old) - 1 :]
    return name


def read_metrics(file: Path, renames: Mapping[str, str] | None = None) -> Lines:
    """Returns the machine-independent metrics of each iteration."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        {renamed(name, renames or {}): value for name, value in line.items() if not name.startswith(MACHINE_DEPENDENT)}
        for line in lines
    ]


def compare(old: Lines, new: Lines, rel: float = 0.0) -> Iterator[str]:
    """Yields a line for each difference, in the order of the iterations."""
    if len(old) != len(new):
        yield f"{len(old)} iterations before, {len(new)} now"
    for before, after in zip(old, new, strict=False):
        step = after.get("step", before.get("step"))
        for name in sorted(before.keys() | after.keys()):
            if name not in before or name not in after:
                yield f"step {step}: {name} is only in the {'old' if name in before else 'new'} run"
            elif not equal(before[name], after[name], rel):
                yield f"step {step}: {name} was {before[name]!r}, is {after[name]!r}"


def equal(old: float | None, new: float | None, rel: float) -> bool:
    """Returns whether two values are equal; NaN and null equal themselves."""
    if old is None or new is None:
        return old is new
    if math.isnan(old) or math.isnan(new):
        return math.isnan(old) and math.isnan(new)
    return old == new or math.isclose(old, new, rel_tol=rel, abs_tol=rel / 100)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--renames", type=Path)
    parser.add_argument("--rel", type=float, default=0.0)
    parser.add_argument("--only", default="*", help="glob for the names of runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
