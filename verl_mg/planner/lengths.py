"""Recorded lengths: tokens of prompts and responses of samples that a model generated.

A file starts with lines of provenance, each after a `#`; then one sample per line, the tokens of its prompt and of its
response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_mg.errors import UserError


@dataclass(frozen=True, slots=True)
class Length:
    """Number of tokens of one sample, both positive."""

    prompt: int
    response: int

    @property
    def total(self) -> int:
        """Tokens of the row in training."""
        return self.prompt + self.response


def read_lengths(path: str | Path) -> list[Length]:
    """Reads the samples of a file, in order; the UserError names the line that is not a sample."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: not a readable file of lengths ({error}). Write one with tools/record_lengths.py."
        ) from None
    samples = [_read(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if not line.startswith("#")]
    if not samples:
        raise UserError(f"{path}: it contains no lengths. Write one with tools/record_lengths.py.")
    return samples


def _read(line: str, where: str) -> Length:
    numbers = line.split()
    # A count of tokens has far fewer digits than Python reads.
    if len(numbers) != 2 or not all(n.isascii() and n.isdigit() and len(n) < 10 and int(n) for n in numbers):
        raise UserError(
            f"{where}: {line!r} is not a sample. Write two positive numbers, "
            "the tokens of its prompt and of its response."
        )
    return Length(*map(int, numbers))


def write_lengths(path: str | Path, lengths: Sequence[Length], provenance: Sequence[str]) -> None:
    """Writes a file that `read_lengths` reads; `provenance` are lines about the origin of the samples."""
    head = "".join(f"# {line}\n" for line in provenance)
    rows = "".join(f"{length.prompt} {length.response}\n" for length in lengths)
    Path(path).write_text(head + rows, encoding="utf-8")


def longest_to(lengths: Sequence[Length], longest: int) -> list[Length]:
    """Scales all lengths by the factor that makes the longest sample `longest` tokens."""
    factor = longest / max(length.total for length in lengths)
    return [
        Length(max(1, round(length.prompt * factor)), max(1, round(length.response * factor))) for length in lengths
    ]
