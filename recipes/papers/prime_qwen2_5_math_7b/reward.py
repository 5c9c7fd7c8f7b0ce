"""Outcome reward of PRIME's data (arXiv:2502.01456, section 4.1): 1 or 0 for mathematics, passed tests for programs."""

import asyncio

from verl_mg.rewards import Reward, Sample, code, math


async def score(sample: Sample) -> Reward:
    """Scores a program by the share of the record's tests that it passes, and an answer by whether it is right.

    Args:
        sample: the sample; its record has `tests`, or an answer.
    """
    if sample.record.get("tests"):
        return await code.score(sample, field="tests", partial=True)
    return await asyncio.to_thread(math.score, sample)
