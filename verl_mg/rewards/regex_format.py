"""Reward for only the format of a response, as a part of a mixture."""

import re

from verl_mg.errors import UserError
from verl_mg.rewards.reward import Reward, Sample

THINK_ANSWER = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"
"""The format that DeepSeek-R1-Zero was rewarded for [arXiv:2501.12948, section 2.2]."""


class RegexFormat:
    """Scores `hit` where the whole response matches a regular expression, else `miss`.

    "." matches line ends too. Python's regular expressions can run without end where repetitions are nested; such a
    pattern blocks the job.
    """

    def __init__(self, pattern: str = THINK_ANSWER, hit: float = 1.0, miss: float = 0.0) -> None:
        """Compiles the pattern.

        Args:
            pattern: regular expression of Python's `re`; UserError where it is none.
            hit, miss: rewards of a response that matches, and of any other one.
        """
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise UserError(f"pattern: {pattern!r} is not a regular expression ({error}). Correct it.") from None
        self._hit, self._miss = hit, miss

    def score(self, sample: Sample) -> Reward:
        """Returns the reward, with the part "form", 0.0 or 1.0."""
        matches = self._pattern.fullmatch(sample.response) is not None
        return Reward(self._hit if matches else self._miss, {"form": float(matches)})
