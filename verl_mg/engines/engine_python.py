"""The Python of engine processes, which may be that of another environment than this one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from verl_mg.errors import UserError
from verl_mg.sharding.traced_table import EngineName

NAMES: dict[EngineName, str] = {"sglang": "SGLang", "vllm": "vLLM"}  # names of the engines in messages
# Remedies where an engine is missing.
INSTALLATION: dict[EngineName, str] = {
    "sglang": "Install it with pip install 'verl-mg[sglang]', or bash tools/install/sglang_cpu.sh on a CPU",
    "vllm": "Install it in a separate environment, on a CPU with bash tools/install/vllm_cpu.sh, and give the path "
    "of its bin/python as rollout.python",
}


def engine_python(engine: EngineName, python: Path | None) -> str:
    """Returns the path of the Python in which an engine runs; UserError where it cannot import the engine.

    `python` is the value of `rollout.python`; None is the Python of this process.
    """
    if python is None:
        if importlib.util.find_spec(engine) is None:
            raise UserError(
                f"rollout.engine={engine}: {NAMES[engine]} is not installed. {INSTALLATION[engine]}, or write "
                "rollout.engine=hf."
            )
        return sys.executable
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({engine!r}) is None)"
    try:
        done = subprocess.run([python, "-c", code], stdin=subprocess.DEVNULL, capture_output=True)
    except OSError as error:
        raise UserError(
            f"rollout.python={python}: it cannot be started ({error.strerror}). Give the path of a Python, such as "
            ".venv-vllm/bin/python."
        ) from None
    if done.returncode:
        raise UserError(f"rollout.python={python}: it has no {NAMES[engine]}. {INSTALLATION[engine]}.")
    return str(python.absolute())


def engine_version(engine: EngineName, python: Path | None) -> str:
    """Returns the version of an engine that is installed in a Python; raises UserError as `engine_python`."""
    # The package may be installed under another name, such as vllm-cpu.
    code = f"import importlib.metadata as m; print(m.version(m.packages_distributions()[{engine!r}][0]))"
    # Libraries of GPUs may write bytes that are not UTF-8.
    done = subprocess.run([engine_python(engine, python), "-c", code], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise UserError(f"rollout.python={python}: its {NAMES[engine]} has no version. {INSTALLATION[engine]}.")
    return done.stdout.strip()
