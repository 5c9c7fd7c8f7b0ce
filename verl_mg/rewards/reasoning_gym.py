"""Reward of prompts that the optional package reasoning-gym generated, by the scoring function of their task."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from verl_mg.errors import UserError
from verl_mg.rewards.sample import Reward, Sample


def score(sample: Sample, tag: str = "answer") -> Reward:
    """Scores the last `<answer>...</answer>` of a response, 0 to 1; a response without it has 0.

    Some tasks parse the text with sympy, in the job's process.

    Args:
        sample: a response to a prompt of `data.train=reasoning_gym:TASK`.
        tag: name of the tag around the answer. "": the whole response is the answer.

    Returns:
        The score; its part `no_answer` is 1 for responses without the tag, `failed` for those that make the scoring
        function raise.
    """
    entry, task = sample.record.get("entry"), sample.record.get("dataset")
    if not isinstance(entry, dict) or not isinstance(task, str):
        raise UserError(
            "reward verl_mg.rewards.reasoning_gym:score: the record has no 'entry' and 'dataset'. Use data generated "
            "by data.train=reasoning_gym:TASK."
        )
    tagged = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", sample.response, re.DOTALL)
    answer = tagged[-1].strip() if tag and tagged else None if tag else sample.response.strip()
    if answer is None:
        return Reward(0.0, {"no_answer": 1.0, "failed": 0.0})
    try:
        value = float(_scorer(task)(answer, entry))
    except Exception:  # parsers raise anything for text that is no answer
        return Reward(0.0, {"no_answer": 0.0, "failed": 1.0}, answer)
    return Reward(value, {"no_answer": 0.0, "failed": 0.0}, answer)


@functools.cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym

    scorer: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(task)
    return scorer
