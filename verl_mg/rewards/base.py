"""What a reward function takes and returns, and finding one by its name."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

from verl_mg.errors import UserError
from verl_mg.named import load_function


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
    function = load_function(name, "reward")

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


def _as_reward(result: Any, name: str) -> Reward:
    reward = result if isinstance(result, Reward) else Reward(result)
    value = _finite(reward.value, name)
    return Reward(value, {part: _finite(number, f"{name} ({part})") for part, number in reward.parts.items()})


def _finite(value: Any, name: str) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise UserError(f"reward '{name}' returned {value!r:.80}; return a finite number or a Reward of them")
    return float(value)
