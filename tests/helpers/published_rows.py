"""Rows of published data sets as they are on the hub, invented but for their form, and their files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from tests.helpers.json_lines import write_lines

Row = dict[str, Any]

DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its "
    'own line after "Answer:".'
)


def verl_row(problem: str, answer: str, index: str) -> Row:
    """A row of DAPO-Math-17k and of its AIME-2024."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": DAPO_PROMPT.format(problem)}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def eurus_row(question: str, truth: str, ability: str) -> Row:
    """A row of Eurus-2-RL-Data."""
    system = "When tackling complex reasoning tasks, you have access to the following actions: [ASSESS] [ADVANCE]."
    return {
        "data_source": "numina_olympiads" if ability == "math" else "taco",
        "prompt": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
    }


def math_row(problem: str, level: str, solution: str) -> Row:
    """A row of MATH-lighteval."""
    return {"problem": problem, "level": level, "solution": solution, "type": "Algebra"}


SUMS = [(a, b) for a in range(3) for b in range(2)]
TESTS = json.dumps({"inputs": ["2 3\n", "4 5\n"], "outputs": ["5\n", "9\n"]})
MATH_500_ROW = {
    "problem": "Find $7+1$.",
    "solution": "It is $\\boxed{8}$.",
    "answer": "8",
    "subject": "Algebra",
    "level": 3,
    "unique_id": "test/algebra/1.json",
}
DAPO_ROWS = [verl_row(f"Compute ${a}+{b}$.", str(a + b), f"{a}{b}") for a, b in SUMS]
MATH_ROWS = [
    *(math_row(f"Find ${a}+{b}$.", f"Level {a + 3}", f"Add: $\\boxed{{{a + b}}}$.") for a, b in SUMS),
    math_row("What is $\\frac{1}{2}$?", "Level 4", "First $\\boxed{3}$, then $\\boxed{\\frac{1}{2}}$."),
    math_row("Too easy.", "Level 2", "$\\boxed{1}$"),
    math_row("Of unknown level.", "Level ?", "$\\boxed{1}$"),
    math_row("Without an answer.", "Level 5", "None."),
    math_row("Find $7+1$.", "Level 3", "In MATH-500: $\\boxed{8}$."),
]
EURUS_ROWS = [
    *(eurus_row(f"What is {a}+{b}?", str(a + b), "math") for a, b in SUMS),
    eurus_row("Read two numbers and print their sum.", TESTS, "code"),
]
MAGICODER_ROWS = [
    {"lang": "python", "index": a, "problem": f"Add {a} and {b}.", "solution": f"```python\nprint({a + b})\n```"}
    for a, b in SUMS
]
EVOL_ROWS = [{"instruction": "Print a number.", "output": "```python\nprint(1)\n```"}]


def write_parquet(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes rows in small row groups, and returns the file."""
    pa.parquet.write_table(pa.Table.from_pylist(list(rows)), file, row_group_size=3)
    return file


def write_published(folder: Path) -> dict[str, list[Path]]:
    """Writes the files of each set, with its repetitions, by the name that tools/prepare_data.py gives it."""
    dapo = write_parquet(folder / "dapo-math-17k.parquet", DAPO_ROWS * 3)
    aime = write_parquet(folder / "aime-2024.parquet", DAPO_ROWS[:2] * 4)
    eurus = write_parquet(folder / "train.parquet", EURUS_ROWS)
    math = write_parquet(folder / "math.parquet", MATH_ROWS)
    lines = {"math_500": [MATH_500_ROW], "magicoder": MAGICODER_ROWS, "evol": EVOL_ROWS}
    for name, rows in lines.items():
        write_lines(folder / f"{name}.jsonl", rows)
    code = [folder / "magicoder.jsonl", folder / "evol.jsonl"]
    return {
        "dapo_math_17k": [dapo],
        "aime_2024": [aime],
        "eurus_2_rl": [eurus],
        "eurus_2_rl_validation": [eurus],
        "math_level_3_to_5": [math],
        "math_500": [folder / "math_500.jsonl"],
        "code_instructions": code,
        "code_prompts_3k": code,
    }
