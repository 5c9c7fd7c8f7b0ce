"""Prompts of a file, by the section `data` of a job's configuration."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl_mg.config import DataConfig
from verl_mg.data import PromptSet, read_prompts
from verl_mg.data.image_processor import ImageProcessor


def prompt_set(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int = 0,
    tools: Sequence[dict[str, Any]] = (),
    report: Callable[[str], None] | None = None,
    processor: ImageProcessor | None = None,
    **keys: Any,
) -> PromptSet:
    data = DataConfig(train=Path(path), **keys)
    prompts = read_prompts(data, "train", tokenizer, seed=seed, tools=tools, report=report, processor=processor)
    assert isinstance(prompts, PromptSet)
    return prompts
