"""Program of a rank in a fork of a process that has imported everything: a rank starts in tenths of a second.

    launcher  ──▶  fork server of `multiprocessing`, which has imported a job's modules  ──▶  ranks, also after a loss

The server has no threads and no CUDA context, neither of which a fork can take over. Where its forks cannot use the
GPU, ranks are new interpreters.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import traceback
from multiprocessing import forkserver
from pathlib import Path

from verl_mg import device
from verl_mg.distributed.launcher import Launcher

IMPORTED = "verl_mg.launch.imported"
FORK_SAFE_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"  # variable by which torch asks the driver, not CUDA, for GPUs


def start_server() -> None:
    """Starts the fork server, which imports the modules of jobs; does not wait for it."""
    # torchrun sets it with a warning if there are several ranks; a rank then chooses by its cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    device.set_default_variables()
    os.environ.setdefault(FORK_SAFE_CHECK, "1")  # if torch asked CUDA, the forks could not use the GPUs
    context = multiprocessing.get_context("forkserver")
    context.set_executable(os.environ.get("PYTHON_EXEC", sys.executable))  # torchrun's variable
    context.set_forkserver_preload([IMPORTED])
    forkserver.ensure_running()


def forks_can_use_devices() -> bool:
    """Returns whether forks of the server can use the devices of this machine."""
    # Whether an import has initialized CUDA, which forks then cannot use, shows only in a fork.
    probe = multiprocessing.get_context("forkserver").Process(target=_use_device)
    probe.start()
    probe.join()
    return probe.exitcode == 0


def _use_device() -> None:
    import torch

    torch.zeros(1, device=device.current_device())


def run_program(*arguments: str) -> None:
    """Runs `[-u] -m MODULE ...` or `[-u] SCRIPT ...` in this process; exits with its code unless that is 0."""
    # A rank is not forked further. The driver's library would be loaded and searched at each question: 0.13 ms without
    # a GPU, at every change of phase with `profile.synchronize`.
    os.environ.pop(FORK_SAFE_CHECK, None)
    # A fork has the server's name in lists of processes.
    Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}", encoding="ascii")
    words = list(arguments)
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        words.pop(0)
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    if launcher := Launcher.of_this_rank():
        launcher.return_mark(os.getpid()).touch()
        if launcher.regroup_mark.exists():
            sys.exit()  # the agent waits for the end of the process; otherwise it waits for all programs to be complete


if __name__ == "__main__":
    run_program(*sys.argv[1:])
