"""Host of an engine, of which each process tells what it has imported: it runs the module in HOST, see `test_packages`.

At SIGUSR2 a process writes {"packages": [...], "memory_saver": {...}} into the folder TOLD: the packages that it has
imported, and what was chosen for the hook of `torch_memory_saver`.
"""

import json
import os
import runpy
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def tell(*_: object) -> None:
    packages = sorted({name.partition(".")[0] for name, module in list(sys.modules.items()) if module is not None})
    saver = import_module("torch_memory_saver").torch_memory_saver if find_spec("torch_memory_saver") else None
    file = Path(os.environ["TOLD"]) / f"{os.getpid()}.json"
    partial = file.with_suffix(".partial")
    partial.write_text(
        json.dumps({"packages": packages, "memory_saver": vars(saver)["_impl_ctor_kwargs"] if saver else {}})
    )
    partial.rename(file)


if __name__ in ("__main__", "__mp_main__"):  # also in each process that the engine spawns
    signal.signal(signal.SIGUSR2, tell)
    runpy.run_module(os.environ["HOST"], run_name=__name__)
