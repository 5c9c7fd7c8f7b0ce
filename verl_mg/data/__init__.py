"""Prompts, demonstrations and preferences from data files; no processes, no training."""

from verl_mg.data.prompt_feed import Curriculum, PromptFeed, Prompts
from verl_mg.data.prompts import Mixture, Prompt, PromptSet, longest_row
from verl_mg.data.reading import read_prompts, reward_key
from verl_mg.data.records import read_records
from verl_mg.data.training_rows import demonstration, demonstrations_batch, num_demonstrations, pairs_batch, preference

__all__ = [
    "Curriculum",
    "Mixture",
    "Prompt",
    "PromptFeed",
    "PromptSet",
    "Prompts",
    "demonstration",
    "demonstrations_batch",
    "longest_row",
    "num_demonstrations",
    "pairs_batch",
    "preference",
    "read_prompts",
    "read_records",
    "reward_key",
]
