r"""DAPO's reward for mathematics: +1 or -1 for the last line `Answer: ...` [arXiv:2503.14476, section 2.4].

Answers are compared as texts after the normalisation of Minerva [arXiv:2206.14858, appendix D.1].
"""

import re

from verl_mg.errors import UserError
from verl_mg.rewards.answer_part import answer_part
from verl_mg.rewards.reward import Reward, Sample

TAIL = 300  # number of characters at the end of a response that must contain the answer
ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")

# The rules of the appendix cited above, in its order.
SUBSTITUTIONS = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots",
)  # fmt: skip


def score(sample: Sample, correct: float = 1.0, wrong: float = -1.0) -> Reward:
    """Scores the last `Answer:` line of the response; the parts "correct" and "answered" are 0.0 or 1.0.

    Args:
        sample: the sample to score; UserError where its record has no answer.
        correct: reward where the line equals the record's answer.
        wrong: reward otherwise, also without such a line.
    """
    if sample.answer is None or not sample.answer.strip():
        raise UserError(
            f"rewards.dapo: the record of the prompt {sample.prompt[:60]!r} has no answer. "
            f"Set data.answer_field to one of: {', '.join(sample.record)}."
        )
    matches = ANSWER.findall(answer_part(sample.response)[-TAIL:])
    answer = normalised(matches[-1]) if matches else None
    right = answer is not None and answer == normalised(sample.answer)
    parts = {"correct": float(right), "answered": float(answer is not None)}
    return Reward(correct if right else wrong, parts, answer)


def normalised(answer: str) -> str:
    r"""Returns an answer without units, spaces and variants of LaTeX: `$\frac12$ km` becomes `frac{1}{2}`."""
    answer = answer.rpartition("=")[2]
    for before, after in SUBSTITUTIONS:
        answer = answer.replace(before, after)
    for expression in REMOVED:
        answer = answer.replace(expression, "")
    # Keep the content of mathematics, and remove commands around text.
    answer = re.sub(r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$", answer)
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    # frac12 -> frac{1}{2}, sqrt3 -> sqrt{3}
    answer = re.sub(r"(frac)([^{])(.)", r"\1{\2}{\3}", answer)
    answer = re.sub(r"(sqrt)([^{])", r"\1{\2}", answer)
    answer = answer.replace("$", "")
    return (answer.replace(",", "") if answer.replace(",", "").isdigit() else answer).strip()
