"""Rewards: functions and classes that score a sample, built in or the user's. They do not depend on training."""

from verl_mg.config import RewardConfig
from verl_mg.rewards.mixture import Mixture
from verl_mg.rewards.reward import AsyncScorer, LoadedReward, Reward, Sample, load_reward

__all__ = ["AsyncScorer", "LoadedReward", "Mixture", "Reward", "Sample", "load_reward", "load_rewards"]


def load_rewards(config: RewardConfig) -> AsyncScorer:
    """Builds the scorer of a job: its single reward, or its mixture.

    Args:
        config: the section `reward`; UserError for a reward that cannot be loaded.
    """
    if not config.mixture:
        reward = load_reward(config.function, config.options)
        return AsyncScorer({"": reward}, workers=config.workers)
    rewards = {name: load_reward(part.function, part.options) for name, part in config.mixture.items()}
    weights = {name: part.weight for name, part in config.mixture.items()}
    return AsyncScorer(rewards, workers=config.workers, mixture=Mixture(weights, config.weights_file))
