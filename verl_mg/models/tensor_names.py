"""Names of the tensors of a model directory, from which follows what config.json does not say."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path


def names_of_tensors(folder: Path) -> Collection[str]:
    """Returns the names in the index of a directory, or in its only file; () where it has neither."""
    try:
        index = folder / "model.safetensors.index.json"
        if index.exists():
            return frozenset(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        # Only the header, which follows its length of 8 bytes: the file may be many GB.
        with open(folder / "model.safetensors", "rb") as file:
            return frozenset(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
    except (OSError, ValueError, LookupError, TypeError):  # reported where the weights are read
        return ()


def stacks_experts(names: Collection[str], prefix: str) -> bool:
    """Returns whether files stack the experts of layers with this prefix, by projection (Qwen3.5)."""
    return any(name.startswith(prefix) and name.endswith(".mlp.experts.gate_up_proj") for name in names)
