"""Task of answering a digit with that digit six times: a model, prompts, preferences, and a reward.

    python recipes/tasks/repeat_digit.py runs/repeat_digit
    verl-mg train recipes/ppo.py --config recipes/configs/repeat_digit/ppo.yaml

A model of random weights learns it in seconds on a CPU, so every recipe has a configuration for it in
recipes/configs/repeat_digit/, and shows with it that its own objective improves.
"""

import itertools
import json
import random
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.rewards import Reward, Sample

DIGITS, LENGTH = "0123456789", 6
SPECIAL = re.compile("<[a-z]+>")  # which a policy of random weights writes as often as digits
EMBEDDING = "model.embed_tokens.weight"


def score(sample: Sample) -> Reward:
    """Returns a reward from -1 to 1, linear in the share of the six places that have the digit."""
    places = written_places(sample)
    right = places.count(sample.prompt[-2])
    return Reward(2 * right / LENGTH - 1, {"right": right / LENGTH}, answer=places)


def shares(sample: Sample) -> Reward:
    """Returns the share of the six places that have the digit, from 0 to 1.

    A part, and the reward of the only turn, is the share of places with any digit.
    """
    written = written_places(sample)
    right, digits = (sum(place in wanted for place in written) / LENGTH for wanted in (sample.prompt[-2], DIGITS))
    return Reward(right, {"right": right, "digits": digits, "turn_1": digits}, answer=written)


def first_digit(sample: Sample) -> Reward:
    """Returns 1 if the first place has the digit, else 0."""
    places = written_places(sample)
    return Reward(float(places.startswith(sample.prompt[-2])), answer=places)


def written_places(sample: Sample) -> str:
    """Returns the characters of a response in the six places; special tokens, such as padding, take none."""
    return SPECIAL.sub("", sample.response)[:LENGTH]


def make(folder: Path, seed: int = 0) -> None:
    """Writes `model/`, a mixture of experts `mixture/`, and `data/` with training and test prompts and preferences.

    Args:
        folder: where to write; made if it is missing.
        seed: seed of the weights and of the data.
    """
    for name, architecture in (("model", "qwen3"), ("mixture", "qwen3_moe")):
        size: dict[str, Any] = {"hidden": 64, "layers": 2, "ffn": 128, "max_positions": 64, "init_std": 0.06}
        make_tiny_model(folder / name, architecture, characters=DIGITS + "=", seed=seed, **size)
        _embed_padding(folder / name / "model.safetensors")
    prompts = [{"prompt": f"{a}{b}=", "answer": b * LENGTH} for a, b in itertools.product(DIGITS, repeat=2)]
    chance = random.Random(seed)
    chance.shuffle(prompts)
    data = folder / "data"
    _write(data / "test.jsonl", prompts[:20])
    _write(data / "train.jsonl", prompts[20:])
    _write(data / "preferences.jsonl", [_preference(prompt, chance) for prompt in prompts[20:] for _ in range(8)])


def _embed_padding(weights: Path) -> None:
    # A policy of random weights writes padding too. Its embedding is 0, where the gradient of a norm is a thousand
    # times that of other tokens and would dominate the first update.
    tensors = load_file(weights)
    tensors[EMBEDDING][0] = -tensors[EMBEDDING][1]
    save_file(tensors, weights, {"format": "pt"})


def _preference(prompt: dict[str, str], chance: random.Random) -> dict[str, str]:
    wrong = "".join(chance.choices(DIGITS, k=LENGTH))
    return {"prompt": prompt["prompt"], "chosen": prompt["answer"], "rejected": wrong}


def _write(file: Path, records: Iterable[dict[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/repeat_digit"))
