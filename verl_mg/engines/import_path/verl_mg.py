"""This package as the processes of engines find it: begins each of them, which then imports the real package.

Packages of training are hidden there first. SGLang imports megatron-core wherever it is installed
(`srt/debug_utils/dumper.py`), which imports Transformer Engine: seconds of each start, and megatron-core then sets
`torch_memory_saver.hook_mode = "torch"`, under which an engine that releases its memory dies at its start.
"""

import importlib.util
import sys
from pathlib import Path

HIDDEN = ("megatron", "transformer_engine", "transformer_engine_torch", "apex")


def hide_training_packages() -> None:
    """Makes each import of HIDDEN raise ModuleNotFoundError in this process; to be called before the engine's first."""
    for name in HIDDEN:
        if sys.modules.get(name) is not None:
            raise RuntimeError(f"{name} is imported already: the engine's packages were imported too early")
        sys.modules[name] = None  # type: ignore[assignment]  # Python's import raises for such an entry


def import_package(name: str, folder: Path) -> None:
    """Imports the package in a folder under this name."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec and spec.loader
    sys.modules[name] = importlib.util.module_from_spec(spec)  # Python's import takes it in place of this module
    spec.loader.exec_module(sys.modules[name])


if __name__ == "verl_mg":
    hide_training_packages()
    import_package(__name__, Path(__file__).parents[2])
