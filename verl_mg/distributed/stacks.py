"""Where the main thread of a rank stands, told by another thread."""

from __future__ import annotations

import linecache
import os
import re
import sys
import threading
from pathlib import Path
from types import FrameType

DEPTH = 12
"""Innermost frames that are told, whosever they are."""
WAITING = re.compile(r"\.(wait|barrier|synchronize)\(|\bstore\.|IDLE_SECONDS")
"""In a line on which a rank waits for others."""
HERE = os.getcwd() + os.sep
LIBRARIES = re.compile(r"(site|dist)-packages/|lib/python3|<frozen ")


def main_stack() -> list[str]:
    """Frames of the main thread, `file:line function`, the innermost first; of the outer ones those of no library."""
    frame = _frame()
    lines: list[str] = []
    while frame is not None:
        code = frame.f_code
        if len(lines) < DEPTH or not LIBRARIES.search(code.co_filename):
            lines.append(f"{_short(code.co_filename)}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return lines


def main_waits() -> bool:
    """Whether the main thread waits for other ranks, as far as its innermost frame tells."""
    frame = _frame()
    if frame is None:
        return False
    file = frame.f_code.co_filename
    return "/torch/distributed/" in file or bool(WAITING.search(linecache.getline(file, frame.f_lineno or 0)))


def place(stack: list[str]) -> str:
    """`file:line in function` of the innermost frame that is no library's."""
    own = [line for line in stack if not LIBRARIES.search(line)]
    return " in ".join((own or stack)[0].rsplit(" ", 1)) if stack else "an unknown place"


def _frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _short(file: str) -> str:
    if file.startswith(HERE) and not LIBRARIES.search(file):
        return file.removeprefix(HERE)
    # Of an installed file, from the folder that holds all of them.
    parts = Path(file).parts
    kept = next((i for i, part in enumerate(parts) if part.endswith("-packages") or part == "lib"), 0)
    return os.path.join(*parts[kept:])
