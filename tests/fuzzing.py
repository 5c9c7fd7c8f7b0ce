"""What a fuzz of command lines does: damages files, runs each command in a process of its own, judges how it ended.

The processes are forked from one that has imported everything.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import psutil

from verl_mg.run.checkpoint_integrity import SUMS

PATIENCE_S = 90
"""A command that takes longer hangs; the slowest that do not take a few seconds."""
MEMORY = 32 * 2**30
"""Bytes of address space: the system refuses more before the machine suffers."""

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        "verl_mg.cli",
        "verl_mg.run.loop",
        "matplotlib.backends.backend_agg",
        "pyarrow.parquet",
        "torch.utils.tensorboard",
        "transformers.models.qwen2.tokenization_qwen2",
    ]
)


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
            return f"ended with code 0, and told {errors[0]!r}" if errors else ""
        last = self.err.removesuffix("\n").rpartition("\n")[2]
        if last not in errors or len(errors) != 1:
            return f"ended with code 2, and the last line is no error or not the only one: {last!r}"
        return ""


def run_command(arguments: list[str], folder: Path) -> Ended:
    """`verl-mg ARGUMENTS` in a folder, which gets its outputs; whatever it started ends with it."""
    out, err = folder / "stdout", folder / "stderr"
    process = _forks.Process(target=_command, args=(arguments, folder, out, err))
    process.start()
    process.join(PATIENCE_S)
    code = process.exitcode
    if code is None:
        _end(process)
    return Ended(code, *(file.read_text(encoding="utf-8", errors="replace") for file in (out, err)))


def _command(arguments: list[str], folder: Path, out: Path, err: Path) -> None:
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.chdir(folder)
    from verl_mg.cli import main

    main(arguments)


def _end(process: BaseProcess) -> None:
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()
    process.join()


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


def mend_sums(folder: Path) -> None:
    """Have SHA256SUMS agree with the files as they are, so that whatever reads them meets the damage."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != SUMS]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / SUMS).write_text("".join(lines))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each (container, key) of a JSON tree; of a long list the first ones."""
    keys = list(tree) if isinstance(tree, dict) else range(min(len(tree), 4)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])
