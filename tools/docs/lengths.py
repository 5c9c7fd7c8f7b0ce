"""Recorded lengths: tokens of prompts and responses of samples that a model generated.

A file starts with lines of provenance, each after a `#`; then one sample per line, the tokens of its prompt and of its
response.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Length(NamedTuple):
    """Number of tokens of one sample, both positive."""

    prompt: int
    response: int

    @property
    def total(self) -> int:
        return self.prompt + self.response


def read_lengths(path: Path) -> list[Length]:
    """The samples of a file, in order."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [Length(*map(int, line.split())) for line in lines]


def longest_to(lengths: Sequence[Length], longest: int) -> list[Length]:
    """Scales all lengths by the factor that makes the longest sample `longest` tokens."""
    factor = longest / max(length.total for length in lengths)
    return [Length(max(1, round(prompt * factor)), max(1, round(response * factor))) for prompt, response in lengths]
