"""The response must be the answer, letter by letter."""

from verl_mg.rewards.base import Reward, Sample


def score(sample: Sample) -> Reward:
    """1.0 where response and answer agree up to space around them, else 0.0 (also without an answer)."""
    return Reward(float(sample.answer is not None and sample.response.strip() == sample.answer.strip()))
