"""Evaluation by a plain script: `transformers` generates, and sets of k samples are counted one by one."""

import json
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def greedy_responses(model_dir: Path, file: Path, max_new_tokens: int) -> list[str]:
    """The greedy response to the field `prompt` of each line."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    responses = []
    for line in file.read_text().splitlines():
        tokens = tokenizer(json.loads(line)["prompt"], return_tensors="pt")["input_ids"]
        generated = model.generate(tokens, do_sample=False, max_new_tokens=max_new_tokens, use_cache=False)
        written = generated[0, tokens.shape[1] :].tolist()
        ended = written[-1] == tokenizer.eos_token_id
        responses.append(tokenizer.decode(written[:-1] if ended else written))
    return responses


def pass_at(passed: Sequence[Sequence[bool]], k: int) -> float:
    """The mean over problems of the share of all sets of k samples that have a right one."""
    shares = [[any(row[i] for i in chosen) for chosen in combinations(range(len(row)), k)] for row in passed]
    return sum(sum(share) / len(share) for share in shares) / len(shares)


def mean(values: Sequence[str], score: Callable[[str], float]) -> float:
    """The mean score."""
    return sum(map(score, values)) / len(values)
