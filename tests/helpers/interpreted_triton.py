"""Triton's interpreter, which computes kernels on the CPU, in a process that has not imported Triton yet."""

import os
from types import SimpleNamespace
from typing import Any


def use_interpreter() -> None:
    """Has all kernels of this process interpreted."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    replace, replaced = interpreter._patch_lang, set()

    def replace_once(function: Any) -> Any:
        # Triton replaces the functions of its language in each call of each function, which is half of the time.
        if id(function.__globals__) not in replaced:
            replaced.add(id(function.__globals__))
            replace(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = replace_once
    # Each sum of integers is computed again to look for an overflow, which tests are too small for.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def use_kernels() -> None:
    """Has this process compute rows of logits by kernels, and nothing by torch's operations."""
    use_interpreter()
    from verl_mg.training import logprobs
    from verl_mg.training.vocabulary_kernels import TritonRows

    choosing: Any = logprobs
    choosing.rows_on = lambda device: TritonRows
