"""Task of naming the color, or the number, of the squares in an image: a vision-language model, data and a reward.

    python recipes/tasks/colored_squares.py runs/colored_squares
    verl-mg train recipes/grpo.py --config recipes/configs/colored_squares_grpo.yaml

Each color and each number is the answer to equally many questions, of training and of the test: a policy that does not
look at the image is right in a quarter of the cases at most, and in 5 of 8 cases if it sees colors but does not count.
"""

import itertools
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from verl_mg.models.tiny_vision_model import MERGE, PATCH, make_tiny_vision_model
from verl_mg.rewards import Reward, Sample

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0)}
QUESTIONS = ("color?", "count?")
COUNTS = 4
"""Largest number of squares."""
CELLS, ACROSS, CELL = 6, 3, PATCH * MERGE
"""Places for squares in an image, those in a row, and the side of each in pixels; each place is a token."""
PICTURES, HELD_OUT = 6, 1
"""Pictures of each color with each number of squares, and how many of them are for the test."""


def score(sample: Sample) -> Reward:
    """Returns 1.0 for the right answer, and whether the response is a color or a number as the answer is."""
    answered, asked = sample.response in COLORS, sample.answer in COLORS
    kind = answered == asked and sample.response != ""
    return Reward(float(sample.response == sample.answer), {"kind": float(kind)}, answer=sample.response)


def make(folder: Path, architecture: str = "qwen2_5_vl", seed: int = 0, heads: int = 4) -> None:
    """Writes `model/`, and `data/` with train.jsonl, test.jsonl and the images.

    Args:
        folder: where to write; made if it is missing.
        architecture: of the model, one of `tiny_vision_model.ARCHITECTURES`.
        seed: seed of the weights, and of which images are held out.
        heads: attention heads of the model, whose hidden size is 64.
    """
    make_tiny_vision_model(
        folder / "model",
        architecture,
        characters="".join(map(str, range(1, COUNTS + 1))),
        words=(*COLORS, *QUESTIONS),
        heads=heads,
        max_positions=64,
        init_std=0.06,
        seed=seed,
    )
    (folder / "data" / "images").mkdir(parents=True, exist_ok=True)
    test, train = [], []
    shuffle = random.Random(seed)
    for color, count in itertools.product(COLORS, range(1, COUNTS + 1)):
        places = shuffle.sample(list(itertools.combinations(range(CELLS), count)), PICTURES)
        records = [_record(folder / "data", color, cells, question) for cells in places for question in QUESTIONS]
        test += records[: HELD_OUT * len(QUESTIONS)]
        train += records[HELD_OUT * len(QUESTIONS) :]
    _write(folder / "data" / "test.jsonl", test)
    _write(folder / "data" / "train.jsonl", train)


def _record(folder: Path, color: str, cells: tuple[int, ...], question: str) -> dict[str, object]:
    name = f"images/{color}-{''.join(map(str, cells))}.png"
    image = Image.new("RGB", (ACROSS * CELL, CELLS // ACROSS * CELL), "white")
    for cell in cells:
        corner = (cell % ACROSS * CELL, cell // ACROSS * CELL)
        image.paste(COLORS[color], (*corner, corner[0] + CELL, corner[1] + CELL))
    image.save(folder / name)
    answer = color if question == QUESTIONS[0] else str(len(cells))
    return {"prompt": f"<image>{question}", "images": [name], "answer": answer}


def _write(file: Path, records: Iterable[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    make(Path((sys.argv[1:2] or ["runs/colored_squares"])[0]), (sys.argv[2:3] or ["qwen2_5_vl"])[0])
