"""Stack of the main thread, and whether it waits for other ranks; read by the threads of the watchdog."""

from __future__ import annotations

import linecache
import os
import re
import sys
import threading
from pathlib import Path
from types import FrameType

STACK_DEPTH = 12
"""Innermost frames that are reported, library frames included; the heartbeat writes them at each interval."""
LIBRARIES = re.compile(r"(site|dist)-packages/|lib/python3|<frozen ")  # pattern of the paths of library files
WORKING_DIR = os.getcwd() + os.sep
WAITING_LINE = re.compile(r"\.(wait|barrier|synchronize)\(|\bstore\.|IDLE_SECONDS")
"""Pattern of a source line on which a rank waits for other ranks."""


def main_stack() -> list[str]:
    """Returns the main thread's frames as `file:line function`, innermost first."""
    # Library frames are included only among the innermost `STACK_DEPTH`.
    frame = _main_frame()
    lines: list[str] = []
    while frame is not None:
        code = frame.f_code
        if len(lines) < STACK_DEPTH or not LIBRARIES.search(code.co_filename):
            lines.append(f"{_short_path(code.co_filename)}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return lines


def main_waits() -> bool:
    """Returns whether the main thread waits for other ranks, as far as the source line of its innermost frame shows."""
    # By its text: Python does not say what a thread waits for. A wrong guess only changes the message on a stall.
    frame = _main_frame()
    if frame is None:
        return False
    file = frame.f_code.co_filename
    return "/torch/distributed/" in file or bool(WAITING_LINE.search(linecache.getline(file, frame.f_lineno or 0)))


def innermost_user_frame(stack: list[str]) -> str:
    """Returns `file:line in function` of the innermost frame of a stack that is outside of libraries."""
    user_frames = [line for line in stack if not LIBRARIES.search(line)]
    return " in ".join((user_frames or stack)[0].rsplit(" ", 1)) if stack else "an unknown line"


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _short_path(file: str) -> str:
    if file.startswith(WORKING_DIR) and not LIBRARIES.search(file):
        return file.removeprefix(WORKING_DIR)
    # For an installed file, the path from its site-packages or lib folder on.
    parts = Path(file).parts
    start = next((i for i, part in enumerate(parts) if part.endswith("-packages") or part == "lib"), 0)
    return os.path.join(*parts[start:])
