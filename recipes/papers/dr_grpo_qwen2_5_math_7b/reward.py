"""Reward of Dr. GRPO's runs (arXiv:2503.20783): 1 or 0, and 0 for a response that is cut, as in the authors' script."""

from dataclasses import replace

from verl_mg.rewards import Reward, Sample, math


def score(sample: Sample) -> Reward:
    """Scores the answer of a response that ended by itself, by math-verify.

    Args:
        sample: the sample; its record has an answer.
    """
    reward = math.score(sample)
    return replace(reward, value=0.0) if sample.finish == "length" else reward
