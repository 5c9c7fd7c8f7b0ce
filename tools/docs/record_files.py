"""Records in which files of a tree functions run during the second iteration of a job.

`count_files` copies this file to `sitecustomize.py` on the path of the job, so that every process of it starts
with it and the tree itself stays as it is. The windows are one byte per rank in a file that all processes map:

    second `iteration` starts ──▶ ITERATION ── `update_weights` ──▶ WEIGHTS ──▶ ITERATION ── returns ──▶ closed
"""

import inspect
import mmap
import os
import sys
from types import CodeType

ITERATION, WEIGHTS = "iteration", "weights"
TREE, FOLDER = "COUNT_FILES_TREE", "COUNT_FILES_FOLDER"
"""Environment variables: the tree, and the folder of the results, one file per process with lines `WINDOW FILE`."""
MAX_RANKS = 32
WINDOW_FILE = "windows"


class Recorder:
    """Recorder of one process of the job, with the windows that it shares with all others."""

    def __init__(self, tree: str, folder: str) -> None:
        self._packages = tuple(os.path.join(tree, package, "") for package in ("verl_mg", "recipes"))
        self._tree, self._log = tree, os.path.join(folder, f"{os.getpid()}.txt")
        with open(os.path.join(folder, WINDOW_FILE), "r+b") as file:
            self._windows = mmap.mmap(file.fileno(), 2 * MAX_RANKS)
        self._seen: dict[str, set[str]] = {}
        self._iterations = 0
        self._opened: dict[CodeType, int] = {}

    def install(self) -> None:
        """Watches all threads. A location with nothing new to say is switched off, so the job keeps its pace."""
        watch = sys.monitoring
        watch.use_tool_id(watch.PROFILER_ID, "count_files")
        for event in (watch.events.PY_START, watch.events.PY_RESUME):
            watch.register_callback(watch.PROFILER_ID, event, self._runs)
        watch.register_callback(watch.PROFILER_ID, watch.events.PY_RETURN, self._returns)
        watch.set_events(watch.PROFILER_ID, watch.events.PY_START | watch.events.PY_RESUME)

    def _runs(self, code: CodeType, _: int) -> object:
        # Code of a module or of a class is no function: it runs when something is imported.
        if not code.co_filename.startswith(self._packages) or not code.co_flags & inspect.CO_OPTIMIZED:
            return sys.monitoring.DISABLE
        if code.co_name == "iteration" and code.co_filename.split(os.sep)[-2] == "recipes":
            self._iterations += 1
            if self._iterations == 2:
                self._open(code, 0)
        elif code.co_name == "update_weights" and self._is_open(0) and not self._is_open(MAX_RANKS):
            self._open(code, MAX_RANKS)
        seen = self._seen.setdefault(code.co_filename, set())
        for window, first in ((ITERATION, 0), (WEIGHTS, MAX_RANKS)):
            if window not in seen and self._counts(first):
                seen.add(window)
                with open(self._log, "a", encoding="utf-8") as log:
                    log.write(f"{window} {os.path.relpath(os.path.realpath(code.co_filename), self._tree)}\n")
        return (
            sys.monitoring.DISABLE if len(seen) == 2 and code.co_name not in ("iteration", "update_weights") else None
        )

    def _returns(self, code: CodeType, _: int, __: object) -> None:
        if code in self._opened:
            self._windows[self._opened.pop(code)] = 0

    def _open(self, code: CodeType, first: int) -> None:
        place = first + int(os.environ["RANK"])
        self._opened[code], self._windows[place] = place, 1
        sys.monitoring.set_local_events(sys.monitoring.PROFILER_ID, code, sys.monitoring.events.PY_RETURN)

    def _counts(self, first: int) -> bool:
        # A rank counts in its own window, an engine's process, which never starts an iteration, in that of any rank.
        return self._is_open(first) if self._iterations else any(self._windows[first : first + MAX_RANKS])

    def _is_open(self, first: int) -> bool:
        return "RANK" in os.environ and bool(self._windows[first + int(os.environ["RANK"])])


if TREE in os.environ and __name__ == "sitecustomize":
    Recorder(os.environ[TREE], os.environ[FOLDER]).install()
