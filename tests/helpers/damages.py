"""Damages to a file: to its bytes, or to the values of its JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hypothesis import strategies as st


@dataclass(frozen=True)
class Damage:
    """To a file: what happens to its byte `at`, or to its `at`-th JSON value, counted round and round."""

    file: str
    what: Literal["cut", "put", "flip", "empty", "remove", "folder", "delete", "rename", "set"]
    at: int = 0
    value: Any = None

    def do(self, folder: Path) -> None:
        path = folder / self.file
        if not path.is_file():
            return
        if self.what in ("remove", "folder"):
            path.unlink()
            if self.what == "folder":
                path.mkdir()
            return
        damaged = self._other_json if self.what in ("delete", "rename", "set") else self._other_bytes
        path.write_bytes(damaged(path.read_bytes()))

    def _other_bytes(self, content: bytes) -> bytes:
        at = self.at % max(len(content), 1)
        before, byte, after = content[:at], content[at : at + 1], content[at + 1 :]
        return {
            "cut": before,
            "put": before + b"\x00{" + byte + after,
            "flip": before + bytes(255 - one for one in byte) + after,
            "empty": b"",
        }[self.what]

    def _other_json(self, content: bytes) -> bytes:
        """Of a safetensors file, in its header."""
        tensors = self.file.endswith(".safetensors")
        begin, end = (8, 8 + int.from_bytes(content[:8], "little")) if tensors else (0, len(content))
        try:
            tree = json.loads(content[begin:end])
        except ValueError:
            return content
        places = list(json_places(tree))
        if not places:
            return content
        inside, key = places[self.at % len(places)]
        if self.what == "delete":
            del inside[key]
        elif self.what == "rename" and isinstance(inside, dict):
            inside[str(self.value)] = inside.pop(key)
        else:
            inside[key] = self.value
        text = json.dumps(tree).encode()
        return (len(text).to_bytes(8, "little") if tensors else b"") + text + content[end:]


def json_places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each (container, key) of a JSON tree; of a long list the first ones."""
    keys = list(tree) if isinstance(tree, dict) else range(min(len(tree), 4)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from json_places(tree[key])


def damages(files: tuple[str, ...], values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Damage]]:
    file, at = st.sampled_from(files), st.integers(0, 2**20)
    of_bytes = st.builds(Damage, file, st.sampled_from(("cut", "put", "flip", "empty", "remove", "folder")), at)
    of_json = st.builds(Damage, file, st.sampled_from(("delete", "rename", "set", "set", "set")), at, values)
    return st.lists(st.one_of(of_bytes, of_json, of_json), min_size=1, max_size=2)
