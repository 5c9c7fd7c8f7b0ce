"""Stacks of a rank: the main thread's for the heartbeat, and files of all threads where a job is lost or stalls."""

from __future__ import annotations

import linecache
import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from verl_mg.errors import UserError
from verl_mg.stores.bucket import Bucket
from verl_mg.stores.url import ObjectUrl

UPLOAD_SECONDS = 20.0  # time limit of an upload: launchers kill ranks some time after the first one has ended
UPLOAD_ATTEMPTS = 3
RECORD_SECONDS = 2.0  # time limit of the records of collectives: NCCL can be blocked in what they describe
STACK_DEPTH = 12
"""Innermost frames that are reported, library frames included; the heartbeat writes them at each interval."""
LIBRARIES = re.compile(r"(site|dist)-packages/|lib/python3|<frozen ")  # pattern of the paths of library files
WORKING_DIR = os.getcwd() + os.sep
WAITING_LINE = re.compile(r"\.(wait|barrier|synchronize)\(|\bstore\.|IDLE_SECONDS")
"""Pattern of a source line on which a rank waits for other ranks."""


def dump_rank(folder: Path, rank: int) -> None:
    """Writes rank-RANK.txt with the stacks of all threads, and rank-RANK.{gloo,nccl}.json with latest collectives."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{rank}.txt").write_text(_all_stacks(rank), encoding="utf-8")
        # A daemon thread, which is abandoned at the time limit.
        writer = threading.Thread(target=_write_records, args=(folder, rank), daemon=True)
        writer.start()
        writer.join(RECORD_SECONDS)


def dump_lost_rank(folder: Path, rank: int, origin: str, stack: Sequence[str]) -> None:
    """Writes rank-RANK.txt of a rank that cannot do it itself, with the stack that it has reported last."""
    lines = [f"rank {rank}, {origin}: lost; its main thread as reported last:", *(f"  {frame}" for frame in stack)]
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{rank}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def upload_dumps(folder: Path, url: ObjectUrl, ranks: Sequence[int]) -> None:
    """Puts the files of ranks below a URL in limited time; where it cannot, says in which folder they are."""
    problem = f"no answer in {UPLOAD_SECONDS:.0f} s"

    def put() -> None:
        nonlocal problem
        try:
            bucket = Bucket(url, attempts=UPLOAD_ATTEMPTS)
            for file in (file for rank in ranks for file in sorted(folder.glob(f"rank-{rank}.*"))):
                bucket.put(file.name, [file.read_bytes()])
            problem = ""
        except (OSError, UserError) as error:
            problem = str(error)

    uploader = threading.Thread(target=put, daemon=True)
    uploader.start()
    uploader.join(UPLOAD_SECONDS)
    if problem:
        print(f"error: {url}: stacks are not stored ({problem}). They are in {folder}.", file=sys.stderr, flush=True)


def _all_stacks(rank: int) -> str:
    """Returns the stacks of all threads, the main thread's first, innermost frames last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, this = threading.main_thread().ident, threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    parts = [f"rank {rank}, host {socket.gethostname()}, pid {os.getpid()}\n"]
    for ident, frame in frames:
        if ident != this:
            parts.append(f"thread {names.get(ident, ident)}\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)


def _write_records(folder: Path, rank: int) -> None:
    """Writes torch's flight records; the environment variable TORCH_FR_BUFFER_SIZE is their number."""
    c10d: Any = torch._C._distributed_c10d  # not in torch's stubs
    recorders = {"gloo": c10d._dump_fr_trace_json}
    # GPU: NCCL's flight records too.
    # GPU-TEST: none
    # GPU-RAN: not yet
    if torch.cuda.is_available():
        recorders["nccl"] = c10d._dump_nccl_trace_json
    for name, dump in recorders.items():
        with suppress(OSError, RuntimeError):
            (folder / f"rank-{rank}.{name}.json").write_bytes(dump())


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
