"""The part of a response that is its answer: what follows the reasoning, and lines with the mark of GSM8K's answers.

"<think>Is it A?</think>It is B."          answer_part: "It is B."
"#### Step 1\\nAdd.\\n#### 42\\nChecked."      marked_lines: ("42", text below), ("Step 1", text below)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# What begins and ends the reasoning. gpt-oss then begins the final message.
THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("◁think▷", "◁/think▷"),  # Kimi-VL
    ("<seed:think>", "</seed:think>"),
)
MARK = "####"  # the marker of a final answer in GSM8K, and of a heading in Markdown
BOXED = "\\boxed"
LONGEST = 200  # characters of an answer that patterns are tried on; prose is longer

# "72", "1234.50", "-3/4", "18%", "72 clips", "The answer is 5.", "Answer: 5", but not "Step 5"
QUANTITY = re.compile(
    r"(?:[A-Za-z' ]*(?:\b(?:is|are|answer|equals)|[:=])[: ])?\s*(-?\s?\d*\.?\d+(?:/\d+)?%?)(?:\s[A-Za-z ]*)?\.?"
)
_COMMAND = re.compile(r"\\[A-Za-z]+|sqrt|pi|sin|cos|tan|log|ln")
_WORD = re.compile(r"[A-Za-z]{2}")


class Marked(NamedTuple):
    """The line after a mark, and what follows."""

    line: str
    has_text_below: bool
    has_box_below: bool

    @property
    def is_heading(self) -> bool:
        """Whether it is a heading: text follows below, and it is no number and no formula."""
        return self.has_text_below and not is_formula(self.line)


def answer_part(response: str) -> str:
    """Returns what follows the reasoning; all of a response without reasoning, nothing of one that has not ended it."""
    ends = [place + len(end) for _, end in THOUGHTS if (place := response.rfind(end)) >= 0]
    if not ends and response.lstrip().startswith(tuple(begin for begin, _ in THOUGHTS)):
        return ""
    return response[max(ends, default=0) :]


def marked_lines(text: str) -> Iterator[Marked]:
    """Yields for each mark, the last one first, the first line after it that is not blank."""
    below = box = False
    for piece in reversed(text.split(MARK)[1:]):
        line, _, rest = piece.strip().partition("\n")
        yield Marked(line.strip(), below or bool(rest.strip()), box or BOXED in rest)
        below, box = below or bool(line), box or BOXED in piece


def without_headings(text: str) -> str:
    """Returns a text without the lines that begin with the mark and have no formula of LaTeX: their numbers count."""
    lines = text.splitlines()
    return "\n".join(line for line in lines if not line.startswith(MARK) or "\\" in line or "$" in line)


def is_formula(line: str) -> bool:
    """Returns whether a line is a number, also with its unit, or a formula, and no words."""
    plain = without_separators(line.strip("*_` "))
    if not plain or len(plain) > LONGEST:
        return False
    return QUANTITY.fullmatch(plain) is not None or not _WORD.search(_COMMAND.sub("", plain))


def without_separators(text: str) -> str:
    """Removes the dollar sign of a price and thousands separators."""
    if text.count("$") == 1:
        text = text.replace("\\$", "").replace("$", "")
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).strip()
