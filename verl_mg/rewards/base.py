"""What a reward takes and returns."""

from dataclasses import dataclass, field
from typing import Any, Literal


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
    """The reward of one sample.

    Attributes:
        value: a finite number.
        parts: finite numbers, logged beside it, each under its name.
        answer: the final answer as it was read off the response, for majority votes: equal answers are equal texts.
            None where none was found, or none is looked for.
    """

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
