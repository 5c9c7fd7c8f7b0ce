"""What a reward function takes and returns, and finding one by its name."""

import difflib
import functools
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from verl_mg.errors import UserError


@dataclass(frozen=True)
class Sample:
    """One response to be scored.

    Attributes:
        prompt: the text that the policy saw.
        response: the text that the policy wrote.
        answer: the answer of the record, whole; None where it has none.
        record: the record of the data file.
        finish: "stop" (the policy ended it), "length" (cut at the limit) or "abort".
    """

    prompt: str
    response: str
    answer: str | None
    record: dict[str, Any]
    finish: Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Reward:
    """The reward of one sample; `parts` are logged beside it, each under its name."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)


def load_reward(name: str) -> Callable[[Sample], Reward]:
    """The reward function of that name, its results checked.

    Args:
        name: `package.module:function` or `path/to/file.py:function`. The function takes a `Sample` and
            returns a `Reward` or a plain number.

    Raises:
        UserError: no such module, file or function, or importing it fails. What is returned raises
            UserError when the function raises, or returns anything but finite numbers.
    """
    where, colon, function_name = name.rpartition(":")
    if not (colon and where and function_name):
        raise UserError(f"reward '{name}': write package.module:function or path/to/file.py:function")
    module = _imported(where, name)
    function = getattr(module, function_name, None)
    if not callable(function):
        near = _near(function_name, module)
        raise UserError(f"reward '{name}': {where} has no function '{function_name}'{near}")

    @functools.wraps(function)
    def checked(sample: Sample) -> Reward:
        try:
            result = function(sample)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"reward '{name}' raised {type(error).__name__}: {error}; mend it") from error
        return _as_reward(result, name)

    return checked


def _imported(where: str, name: str) -> ModuleType:
    try:
        return _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:  # a module runs the user's code: it raises what it likes
        raise UserError(
            f"reward '{name}': {where} cannot be imported ({type(error).__name__}: {error}); mend it, or the "
            "name: an importable module, or the path of a file ending in .py"
        ) from error


def _from_file(path: Path) -> ModuleType:
    module_name = f"verl_mg_reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # the suffix .py gives both
    module = importlib.util.module_from_spec(spec)
    # Dataclasses of the file look their module up by name.
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def _near(function_name: str, module: ModuleType) -> str:
    public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    near = difflib.get_close_matches(function_name, public)
    return f"; write one of: {', '.join(near or public)}" if public else "; define it there"


def _as_reward(result: Any, name: str) -> Reward:
    reward = result if isinstance(result, Reward) else Reward(result)
    value = _finite(reward.value, name)
    return Reward(value, {part: _finite(number, f"{name} ({part})") for part, number in reward.parts.items()})


def _finite(value: Any, name: str) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise UserError(f"reward '{name}' returned {value!r:.80}; return a finite number or a Reward of them")
    return float(value)
