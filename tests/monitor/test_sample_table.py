"""Samples as a table: which are shown, with their texts and scores."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import AutoTokenizer

from tests.helpers.tiny_jobs import write_sums
from tests.helpers.tiny_models import tiny_model
from verl_mg.batch import Batch
from verl_mg.config import DataConfig
from verl_mg.data import PromptFeed, read_prompts
from verl_mg.monitor.run_logger import sample_table


def test_sample_table_shows_samples_equally_far_apart(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model", "qwen3")
    write_sums(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    data = DataConfig(train={"sums": {"path": tmp_path / "sums.jsonl"}})
    prompts = PromptFeed(read_prompts(data, "train", tokenizer))
    count = 8
    responses = tokenizer([str(i) for i in range(count)])["input_ids"]
    contexts = [list(prompts.by_id(i // 2).tokens) for i in range(count)]  # two samples of each prompt
    batch = Batch.from_rows([context + response for context, response in zip(contexts, responses, strict=True)])
    for name in ("group", "trajectory", "sample_id"):
        batch[name] = torch.arange(count)
    batch["prompt_id"] = torch.arange(count) // 2
    batch["prompt_length"] = torch.tensor([len(context) for context in contexts])
    batch["truncated"] = torch.zeros(count, dtype=torch.bool)
    batch["reward"] = torch.arange(count) / 4
    batch["reward.form"] = torch.where(torch.arange(count) % 4 == 0, math.nan, 0.5)
    table = sample_table([batch], 4, 7, prompts, tokenizer)
    assert table is not None
    assert table.columns == ("iteration", "prompt", "response", "answer", "reward", "form")
    assert table.rows == [
        [7.0, "0+0=", "0", "0", 0.0, None],
        [7.0, "0+1=", "2", "1", 0.5, 0.5],
        [7.0, "0+2=", "4", "2", 1.0, None],
        [7.0, "0+3=", "6", "3", 1.5, 0.5],
    ]
    whole = sample_table([batch], 100, 7, prompts, tokenizer)
    assert whole is not None and [row[2] for row in whole.rows] == [str(i) for i in range(count)]
    assert sample_table([batch.select([])], 4, 7, prompts, tokenizer) is None
