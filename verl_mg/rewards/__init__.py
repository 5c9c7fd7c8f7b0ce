"""Rewards: functions `score(sample) -> Reward`, ours or the user's; they know nothing of training."""

from verl_mg.rewards.base import Reward, Sample, load_reward

__all__ = ["Reward", "Sample", "load_reward"]
