"""A task whose responses have lengths with a heavy tail, and a model that generates them.

The model has layers without effect, so that the next token depends only on the last one: a Markov chain. Characters
form classes; a character of class k is followed by one of the same class, or by the end with probability 1 / 2^(k+3).
The only character of a prompt chooses the class, and prompts of class k are 2^k times rarer than of class 0: each class
has the same share of all tokens, as with a power law.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

from verl_mg.models.tiny_model import EOS, character_tokenizer, make_tiny_model

CLASSES = 7
CHARACTERS_OF_A_CLASS = 4
SHORTEST = 8
"""Mean length of the responses of class 0; of the last class: 2^6 times as long."""
CONFIDENCE = 12.0
"""Logit of the characters of the same class; all others have 0."""
REWARD = "def score(sample): return len(set(sample.response)) / 4\n"


def make(folder: Path, hidden: int, layers: int, max_positions: int) -> None:
    """Writes `model/`, `train.jsonl` and `reward.py`."""
    classes = [
        "".join(chr(ord("A") + CHARACTERS_OF_A_CLASS * k + i) for i in range(CHARACTERS_OF_A_CLASS))
        for k in range(CLASSES)
    ]
    model = make_tiny_model(
        folder / "model", "qwen3", characters="".join(classes), hidden=hidden, layers=layers, ffn=2 * hidden,
        max_positions=max_positions,
    )  # fmt: skip
    weights = load_file(model / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()
    tokens = character_tokenizer("".join(classes))
    embedding, output = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding.zero_()
    output.zero_()
    scale = math.sqrt(hidden)  # of the only element that is not zero, after the norm
    for k, characters in enumerate(classes):
        ids = [tokens.convert_tokens_to_ids(character) for character in characters]
        embedding[ids, k] = 1.0
        output[ids, k] = CONFIDENCE / scale
        end = 1 / (SHORTEST * 2**k)
        others = CHARACTERS_OF_A_CLASS * math.exp(CONFIDENCE) + len(tokens) - len(ids) - 1
        output[tokens.convert_tokens_to_ids(EOS), k] = math.log(end / (1 - end) * others) / scale
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    lines = [
        {"prompt": characters[i % CHARACTERS_OF_A_CLASS]}
        for k, characters in enumerate(classes)
        for i in range(2 ** (CLASSES - 1 - k))
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reward.py").write_text(REWARD)


def task_settings(folder: Path) -> list[str]:
    """Returns the overrides that name the files of the task."""
    return [
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'train.jsonl'}",
        f"reward.function={folder / 'reward.py'}:score",
    ]


def train(
    recipe: str, folder: Path, run: Path, overrides: Sequence[str], iterations: int, warm_up: int
) -> list[dict[str, float]]:
    """Runs a recipe on the task with SGLang on two ranks of one thread each."""
    settings = [
        *task_settings(folder),
        "rollout.engine=sglang",
        f"job.iterations={iterations}",
        f"job.output={run}",
        "job.save=false",
        "job.console=false",
        "checkpoint.every=0",
        *overrides,
    ]
    file = Path(__file__).parents[2] / "recipes" / f"{recipe}.py"
    launch = [sys.executable, "-m", "verl_mg.launch", "--nproc-per-node=2", "-m", "verl_mg", "train", str(file)]
    subprocess.run([*launch, *settings], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] > warm_up]
