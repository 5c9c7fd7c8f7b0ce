"""Arguments and results of rewards: `Sample` and `Reward`.

Sample(prompt="2+3=", response="5", answer="5", record={"prompt": "2+3=", "answer": "5"},
       finish="stop", num_tokens=2)        the tokens of "5" and the end of sequence
Reward(value=1.0, parts={"correct": 1.0}, answer="5")
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Sample:
    """A response of the policy to be scored."""

    prompt: str
    response: str
    """Text of the policy, of an agent its last reply: without the end token, after what the chat template began of the
    reply."""
    answer: str | None  # answer of the record, unparsed; None where it has none
    record: dict[str, Any]
    finish: Literal["stop", "length", "abort"]
    """Reason why the response ended: "stop" (by the policy), "length" (at the limit) or "abort"."""
    num_tokens: int | None = None  # tokens of the response; None where they were not counted


@dataclass(frozen=True)
class Reward:
    """The reward of one sample."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)  # further finite numbers by name, for the metrics
    answer: str | None = None
    """Final answer that was read from the response, for majority votes: equal answers are equal texts. None where the
    response has none or the reward does not look for one."""
