"""Only the form of a response is judged."""

import re

from verl_mg.errors import UserError
from verl_mg.rewards.base import Reward, Sample

THINK_ANSWER = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"
"""The form that DeepSeek-R1-Zero was rewarded for [arXiv:2501.12948, section 2.2]."""


class RegexFormat:
    """`hit` where the whole response matches `pattern`, else `miss`; "." matches line ends too.

    The patterns of Python can take forever where one repetition stands in another; such a one holds up the job.
    """

    def __init__(self, pattern: str = THINK_ANSWER, hit: float = 1.0, miss: float = 0.0) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise UserError(f"pattern {pattern!r} is no regular expression ({error}); mend it") from None
        self._hit, self._miss = hit, miss

    def score(self, sample: Sample) -> Reward:
        """With the part "form", 0.0 or 1.0."""
        matches = self._pattern.fullmatch(sample.response) is not None
        return Reward(self._hit if matches else self._miss, {"form": float(matches)})
