"""SFT on chosen turns of conversations makes these turns likelier, and no others."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_jobs import write_lines
from tests.recipes.tiny_runs import tiny_run
from verl_mg.models.tiny_model import make_tiny_model


def conversation(chance: random.Random) -> list[dict[str, Any]]:
    """Two digits and two answers: x and the digit, which is not learned, and y and the digit, which is."""
    messages = []
    for letter, learned in (("x", False), ("y", True)):
        digit = chance.choice("0123456789")
        messages += [
            {"role": "user", "content": digit},
            {"role": "assistant", "content": letter + digit, "train": learned},
        ]
    return messages


def logprobs(model: Path, text: str) -> torch.Tensor:
    """The log-prob of each token of a text but the first, by transformers."""
    tokens = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_sft_on_flagged_turns_makes_them_alone_likelier(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    make_tiny_model(tmp_path / "model", "qwen3", hidden=64, layers=2, ffn=128, init_std=0.06, max_positions=64)
    chance = random.Random(0)
    write_lines(tmp_path / "train.jsonl", ({"messages": conversation(chance)} for _ in range(200)))
    overrides = [f"model.path={tmp_path}/model", f"data.train={tmp_path}/train.jsonl", "data.loss_on=flagged"]
    lines = tiny_run(ranks, "sft", tmp_path, tmp_path / "run", [*overrides, f"actor.layout={layout}"])
    assert lines[-1]["actor/loss"] < 0.1 < 2 < lines[0]["actor/loss"]
    before, after = (
        logprobs(tmp_path / of / "model", "<user>3<assistant>x3<eos><user>7<assistant>y7<eos>") for of in (".", "run")
    )
    # The digit of a user gets likelier too, as any digit does, so it is not compared.
    first, last = slice(2, 5), slice(8, 11)  # x3<eos> and y7<eos>
    assert after[last].sum() > -0.5 > -6 > before[last].sum()
    assert after[first].sum() < before[first].sum()  # the policy now writes y instead of x
