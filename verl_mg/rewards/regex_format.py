"""Reward for only the format of a response, as a part of a mixture."""

import regex

from verl_mg.errors import UserError
from verl_mg.rewards.reward import Reward, Sample

# Linear: the first </think> with an <answer> after it is as good as any later one, so the search is atomic, (?>...).
THINK_ANSWER = r"\s*+<think>(?>.*?</think>\s*+<answer>).*</answer>\s*+"
"""The format that DeepSeek-R1-Zero was rewarded for [arXiv:2501.12948, section 2.2]."""


SECONDS = 1.0  # time limit of a match


class RegexFormat:
    """Scores `hit` where the whole response matches a regular expression, else `miss`, also after a second.

    "." matches line ends too. The package `regex` matches, which other threads do not wait for.
    """

    def __init__(self, pattern: str = THINK_ANSWER, hit: float = 1.0, miss: float = 0.0) -> None:
        """Compiles the pattern.

        Args:
            pattern: regular expression of Python's `re` or of `regex`; UserError where it is none.
            hit, miss: rewards of a response that matches, and of any other one.
        """
        try:
            self._pattern = regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise UserError(f"pattern: {pattern!r} is not a regular expression ({error}). Correct it.") from None
        self._hit, self._miss = hit, miss

    def score(self, sample: Sample) -> Reward:
        """Returns the reward, with the part "form", 0.0 or 1.0."""
        try:
            match = self._pattern.fullmatch(sample.response, timeout=SECONDS, concurrent=True)
        except TimeoutError:  # repetitions of the pattern overlap, and the response makes them try every division
            match = None
        matches = match is not None
        return Reward(self._hit if matches else self._miss, {"form": float(matches)})
