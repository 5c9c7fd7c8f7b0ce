"""Runs that repeat each other: their recorded configurations differ only in what a repetition changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

REPEATED = ("job.seed", "job.output")
"""Keys in which repetitions of a run differ."""


def read_configuration(file: Path) -> dict[str, Any]:
    """Returns the values of a configuration by dotted key; none where the file is missing or damaged."""
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return dict(_flatten("", tree)) if isinstance(tree, dict) else {}


def _flatten(prefix: str, tree: dict[str, Any]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in tree.items():
        nested = isinstance(value, dict) and value
        pairs += _flatten(f"{prefix}{name}.", value) if nested else [(f"{prefix}{name}", value)]
    return pairs


def groups_of(configurations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns groups of runs with the same configuration: `runs`, their numbers; `differs`, their values of other keys.

    A run without a readable configuration is a separate group.
    """
    groups: list[tuple[dict[str, Any], list[int]]] = []
    for number, configuration in enumerate(configurations):
        compared = {key: value for key, value in configuration.items() if key not in REPEATED}
        same = next((runs for other, runs in groups if compared and other == compared), None)
        if same is None:
            groups.append((compared, [number]))
        else:
            same.append(number)
    keys = {key for compared, _ in groups for key in compared}
    changed = sorted(key for key in keys if any(other.get(key) != groups[0][0].get(key) for other, _ in groups))
    return [
        {"runs": runs, "differs": {key: str(compared[key]) for key in changed if key in compared}}
        for compared, runs in groups
    ]
