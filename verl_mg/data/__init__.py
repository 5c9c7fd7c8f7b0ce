"""Prompts and demonstrations from JSONL and Parquet files; no processes, no training."""

from verl_mg.data.demonstrations import demonstration
from verl_mg.data.prompts import Prompt, PromptSet
from verl_mg.data.records import read_records

__all__ = ["Prompt", "PromptSet", "demonstration", "read_records"]
