"""Configuration of alarms on metrics.

    alarm: {reward/std: "< 0.01 for 5", actor/loss: {when: not finite, action: stop}}

With the first one a standard deviation below 0.01 in five iterations in a row is logged as a warning.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from pydantic import field_validator, model_validator

from verl_mg.config.section import ConfigSection, refused_values

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
        ">=": operator.ge,
        "==": operator.eq,
        "!=": operator.ne,
    }
)
_CONDITION = re.compile(r"\s*(?:([<>=!]=?)\s*(\S+)|not\s+finite)(?:\s+for\s+(\d+))?\s*")


@dataclass(frozen=True)
class Condition:
    """Condition on the values of a metric in successive iterations."""

    comparison: str | None
    """Operator, a key of `COMPARISONS`. None: the value is not finite."""
    number: float
    """Right side of the comparison; 0 without an operator."""
    iterations: int
    """Iterations in a row in which it must hold."""

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Reads `< 0.01 for 5`, `>= 2` or `not finite`; ValueError for another text."""
        match = _CONDITION.fullmatch(text)
        comparison, number, iterations = match.groups() if match else (None, None, None)
        try:
            value = float(number) if number is not None else 0.0
        except ValueError:
            value = math.nan
        known = comparison is None or comparison in COMPARISONS
        if match is None or not known or not math.isfinite(value) or iterations == "0":
            raise ValueError('not a condition. Write one such as "< 0.01 for 5", ">= 2" or "not finite"')
        return cls(comparison, value, int(iterations or 1))

    def holds(self, value: float) -> bool:
        """Returns whether it holds for a value; every condition holds for a value that is not finite."""
        # Metrics files have null for such a value, so the alarm may be the only sign of it.
        if not math.isfinite(value):
            return True
        return self.comparison is not None and COMPARISONS[self.comparison](value, self.number)


class AlarmConfig(ConfigSection):
    """Alarm on the metric NAME. A text in place of the section is its condition."""

    when: str
    """Condition such as "< 0.01 for 5": an operator of <, <=, >, >=, == and !=, a number, and the number of iterations
    in a row in which it must hold (1 without it). "not finite" is a condition too, and a value that is not finite
    fulfils every other one. Iterations without the metric do not count. In YAML, write it in quotes."""
    action: Literal["log", "stop"] = "log"
    """Reaction. log: a warning. stop: also a checkpoint, after which the run ends with exit code 4; the same command
    resumes."""
    url: str | None = None
    """Address, http or https, that receives the alarm as a POST request with JSON. $NAME is that of an environment
    variable. An address that fails never stops the run. null: none."""

    # `alarm: {NAME: "< 0.01"}` is short for `alarm: {NAME: {when: "< 0.01"}}`.
    @model_validator(mode="before")
    @classmethod
    def _condition_alone(cls, value: Any) -> Any:
        return {"when": value} if isinstance(value, str) else value

    @field_validator("when")
    @classmethod
    def _can_be_parsed(cls, text: str) -> str:
        Condition.parse(text)
        return text

    _refused = refused_values(
        url=(
            lambda url, _: url is not None and not url.startswith(("http://", "https://", "$")),
            "not an address. Write http://HOST:PORT/PATH, or $NAME of an environment variable",
        )
    )
