"""Answers of the code that decides in jobs: a check that raises a UserError says no, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeVar

from verl_mg.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """Whether something works with a model."""

    topic: str
    """The question, such as "megatron tp"."""
    works: bool
    """Whether it works."""
    text: str
    """Sizes or names that work, or why nothing does."""

    def __str__(self) -> str:
        """Returns a line such as "yes: 2 4 8"."""
        return f"{'yes' if self.works else 'no'}{': ' if self.text else ''}{self.text}"


def attempt(work: Callable[[], T]) -> tuple[T | None, str]:
    """Returns the result of a function and "", or None and the message of its UserError."""
    try:
        return work(), ""
    except UserError as error:
        return None, str(error)


def ask(topic: str, check: Callable[[], object], text: str = "") -> Answer:
    """Returns the answer of a check, which raises a UserError for no; `text` is the text of the answer yes."""
    _, reason = attempt(check)
    return Answer(topic, not reason, reason or text)


def ask_sizes(topic: str, layout: str, largest: int, check: Callable[[str], object]) -> Answer:
    """Returns which sizes of a parallel dimension, from 2 to `largest`, pass the check of a layout such as "tp{}".

    Where none does, the reason why 2 is refused is the answer.
    """
    sizes = range(2, max(2, largest) + 1)
    reasons = {size: attempt(partial(check, layout.format(size)))[1] for size in sizes}
    possible = [size for size, reason in reasons.items() if not reason]
    if possible:
        return Answer(topic, True, format_sizes(possible))
    return Answer(topic, False, next(iter(reasons.values())))


def format_sizes(sizes: Sequence[int]) -> str:
    """Returns sizes as text, neighbours as a range: "2 4 8", "2-28"."""
    # Neighbours have the same difference between size and index.
    runs = [[size for _, size in run] for _, run in groupby(enumerate(sizes), lambda pair: pair[1] - pair[0])]
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)
