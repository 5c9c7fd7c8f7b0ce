"""Files with what each rank was doing when its job ended because a rank was lost or all ranks stalled."""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

STALLS = "stalls"  # folder inside a run's folder, with one folder for each time that a job ended so
RECORD_SECONDS = 2.0
"""Time limit of the records of collectives: NCCL can be blocked in what they describe."""


def dump_rank(folder: Path, rank: int) -> None:
    """Writes rank-RANK.txt with the stacks of all threads, and rank-RANK.gloo.json with the latest collectives.

    On GPUs also rank-RANK.nccl.json. A file that cannot be written is left out.
    """
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        _stack_file(folder, rank).write_text(_all_stacks(rank), encoding="utf-8")
        # A daemon thread, which is abandoned at the time limit.
        writer = threading.Thread(target=_write_records, args=(folder, rank), daemon=True)
        writer.start()
        writer.join(RECORD_SECONDS)


def dump_lost_rank(folder: Path, rank: int, origin: str, stack: Sequence[str]) -> None:
    """Writes rank-RANK.txt of a rank that cannot do it itself, with the stack that it has reported last."""
    lines = [f"rank {rank}, {origin}: lost; its main thread as reported last:", *(f"  {frame}" for frame in stack)]
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        _stack_file(folder, rank).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.txt"


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
    if torch.cuda.is_available():
        recorders["nccl"] = c10d._dump_nccl_trace_json
    for name, dump in recorders.items():
        with suppress(OSError, RuntimeError):
            (folder / f"rank-{rank}.{name}.json").write_bytes(dump())
