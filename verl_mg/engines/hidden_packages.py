"""Packages of training that an engine's processes do not find, though they are installed.

SGLang imports megatron-core wherever it is installed (`srt/debug_utils/dumper.py`), which imports Transformer Engine:
seconds of each start, and megatron-core then sets `torch_memory_saver.hook_mode = "torch"`, under which an engine that
releases its memory dies at its start.
"""

from __future__ import annotations

import sys

HIDDEN = ("megatron", "transformer_engine", "transformer_engine_torch", "apex")


def hide_training_packages() -> None:
    """Makes each import of them raise ModuleNotFoundError in this process; to be called before the engine's first."""
    for name in HIDDEN:
        if sys.modules.get(name) is not None:
            raise RuntimeError(f"{name} is imported already: the engine's packages were imported too early")
        sys.modules[name] = None  # type: ignore[assignment]  # Python's import raises for such an entry
