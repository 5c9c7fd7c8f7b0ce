"""Task of sums that a tiny model can only solve by calling a calculator: a model, data and a reward.

    python recipes/tasks/calculator.py runs/calculator
    verl-mg train recipes/sft.py --config recipes/configs/calculator_sft.yaml
    verl-mg train recipes/grpo.py --config recipes/configs/calculator_grpo.yaml

Imitation shows how a call is written and how its result is used, but half of its answers come without a call;
reinforcement learns that calls increase the reward.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.rewards import Reward, Sample

# Operands and sums of equal width let so small a model learn to copy them within a minute.
OPERANDS = range(1000, 5000)
TRAIN, HELD_OUT, DEMONSTRATIONS = 4000, 200, 4000

# A call in SGLang's format "qwen25": what is the same in each is one token.
CALL = ("<tool_call>", '{"name": "calculator", "arguments": {"expression": "', '"}}', "</tool_call>")

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<' + message['role'] + '>' + message['content'] -}}
{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- if message['role'] == 'tool' -%}{{- '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"""


def score(sample: Sample) -> Reward:
    """Returns 1.0 if the last line is the answer, and whether the calculator was called."""
    last_line, called = sample.response.rpartition("\n")[2], CALL[0] in sample.response
    return Reward(float(last_line == sample.answer), {"called": float(called)})


def make(folder: Path, seed: int = 0) -> None:
    """Writes `model/`, and `data/` with demonstrations.jsonl, train.jsonl and test.jsonl.

    Args:
        folder: where to write; made if it is missing.
        seed: seed of the weights and of the sums.
    """
    make_tiny_model(
        folder / "model",
        "qwen3",
        words=("<tool>", *CALL),
        chat_template=CHAT_TEMPLATE,
        hidden=128,
        layers=2,
        ffn=256,
        max_positions=128,
        init_std=0.06,
        seed=seed,
    )
    sums = random.Random(seed).sample(range(len(OPERANDS) ** 2), DEMONSTRATIONS + TRAIN + HELD_OUT)
    pairs = [(OPERANDS[i // len(OPERANDS)], OPERANDS[i % len(OPERANDS)]) for i in sums]
    _write(folder / "data" / "demonstrations.jsonl", _demonstrations(pairs[:DEMONSTRATIONS]))
    _write(folder / "data" / "train.jsonl", map(_question, pairs[DEMONSTRATIONS:-HELD_OUT]))
    _write(folder / "data" / "test.jsonl", map(_question, pairs[-HELD_OUT:]))


def _question(pair: tuple[int, int]) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"{pair[0]}+{pair[1]}"}], "answer": str(sum(pair))}


def _demonstrations(pairs: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Yields, in turn, an answer without a call, a call, and an answer after the result of a call."""
    for i, pair in enumerate(pairs):
        question, result = [{"role": "user", "content": f"{pair[0]}+{pair[1]}"}], str(sum(pair))
        call = f"{CALL[0]}\n{CALL[1]}{pair[0]}+{pair[1]}{CALL[2]}\n{CALL[3]}"
        called = [*question, {"role": "assistant", "content": call}, {"role": "tool", "content": result}]
        yield [
            {"prompt": question, "answer": result},
            {"prompt": question, "answer": call},
            {"prompt": called, "answer": result},
        ][i % 3]


def _write(file: Path, records: Iterator[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/calculator"))
