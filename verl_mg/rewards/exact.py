"""Reward 1.0 for a response that equals the answer, character by character."""

from verl_mg.rewards.reward import Reward, Sample


def score(sample: Sample) -> Reward:
    """Returns 1.0 where response and answer are equal without surrounding space, else 0.0 (also without an answer)."""
    return Reward(float(sample.answer is not None and sample.response.strip() == sample.answer.strip()))
