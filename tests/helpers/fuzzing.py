"""Fuzzing of command lines: damages files, runs each command in its own process, and checks how it ended."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from tests.helpers import warm_start
from verl_mg.run.checkpointer import SUMS

ROOT = Path(__file__).parents[2]
PATIENCE_S = 600
"""A command that takes longer hangs; the slowest that do not take a few seconds on an idle machine."""
MEMORY = 32 * 2**30
"""Bytes of address space: the system refuses more before the machine suffers."""


@dataclass(frozen=True)
class Ended:
    """How a command ended; code None: it did not."""

    code: int | None
    out: str
    err: str

    def problem(self) -> str:
        """What is wrong with this end, "" where nothing is: code 0, or code 2 and one line that says why."""
        if self.code is None:
            return f"did not end in {PATIENCE_S} s"
        if "Traceback" in self.err + self.out or self.code not in (0, 2):
            return f"ended with code {self.code} and a traceback"
        errors = re.findall("^error: .+$", self.err, re.MULTILINE)
        if self.code == 0:
            return f"ended with code 0, and reported {errors[0]!r}" if errors else ""
        last = self.err.removesuffix("\n").rpartition("\n")[2]
        if last not in errors or len(errors) != 1:
            return f"ended with code 2, and the last line is no error or not the only one: {last!r}"
        return ""


def run_command(arguments: list[str], folder: Path) -> Ended:
    """`verl-mg ARGUMENTS` in a folder, which gets its outputs; whatever it started ends with it."""
    warm = warm_start.shared()
    command = ["prlimit", f"--as={MEMORY}", warm.python, "-m", "verl_mg", *arguments]
    variables = os.environ | warm.environment | {"PYTHONPATH": str(ROOT)}
    streams = [folder / "stdout", folder / "stderr"]
    with streams[0].open("wb") as out, streams[1].open("wb") as err:
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=out, stderr=err)
        try:
            code: int | None = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            code = None
            _kill(process.pid, warm)
            process.wait()
    return Ended(code, *(file.read_text(encoding="utf-8", errors="replace") for file in streams))


def _kill(pid: int, warm: warm_start.WarmStart) -> None:
    for parent in filter(None, (pid, warm.program_of(pid))):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(parent)
            for child in [*process.children(recursive=True), process]:
                child.kill()


@dataclass(frozen=True)
class Damage:
    """To a file: what happens to its byte `at`, or to its `at`-th JSON value, counted round and round."""

    file: str
    what: Literal["cut", "put", "flip", "empty", "remove", "folder", "delete", "rename", "set"]
    at: int = 0
    value: Any = None

    def do(self, folder: Path) -> None:
        """Damage the file; nothing where it is no file any more."""
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
        places = list(_places(tree))
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


def rewrite_sums(folder: Path) -> None:
    """Makes SHA256SUMS agree with the damaged files, so that their readers meet the damage."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != SUMS]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / SUMS).write_text("".join(lines))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each (container, key) of a JSON tree; of a long list the first ones."""
    keys = list(tree) if isinstance(tree, dict) else range(min(len(tree), 4)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])
