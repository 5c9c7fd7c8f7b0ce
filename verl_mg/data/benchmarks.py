"""Records of published benchmarks as prompts with answers: functions for `data.prepare`.

AIME, MATH-500 and IFEval need none: `data.prompt_field` and `data.answer_field` name their fields.
"""

from __future__ import annotations

import hashlib
import random
import string
from typing import Any

Record = dict[str, Any]

CHOICE_INSTRUCTION = (
    "Choose the right answer. Reason first, and end with a line that has 'Answer: ' and the letter of your choice."
)
PROGRAM_INSTRUCTION = (
    "Write a Python program that reads its input from the standard input and writes its output to the standard output. "
    "Give the whole program in one block that begins with ```python."
)
FUNCTION_INSTRUCTION = "Complete this Python code, and give all of it in one block that begins with ```python:"


def gpqa(record: Record) -> Record:
    """Returns a record of Idavidrein/gpqa with `prompt`, `choices` and `answer`, a letter from A to D."""
    question = record["Question"].strip()
    right = record["Correct Answer"].strip()
    choices = [right, *(record[f"Incorrect Answer {i}"].strip() for i in (1, 2, 3))]
    # The order of the choices depends only on the question, so that every run and rank asks the same. Not `hash`,
    # which differs between processes unless PYTHONHASHSEED is set.
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    order = random.Random(int.from_bytes(digest)).sample(range(len(choices)), len(choices))
    lines = [f"{letter}) {choices[i]}" for letter, i in zip(string.ascii_uppercase, order, strict=False)]
    return record | {
        "prompt": "\n".join([CHOICE_INSTRUCTION, "", question, "", *lines]),
        "answer": string.ascii_uppercase[order.index(0)],
        "choices": [choices[i] for i in order],
    }


def livecodebench(record: Record) -> Record:
    """Returns a record of livecodebench/code_generation_lite with a prompt; its test cases stay as they are."""
    starter = (record.get("starter_code") or "").strip()
    task = f"{FUNCTION_INSTRUCTION}\n\n```python\n{starter}\n```" if starter else PROGRAM_INSTRUCTION
    return record | {"prompt": f"{record['question_content'].strip()}\n\n{task}"}


def codeforces(record: Record) -> Record | None:
    """Returns a record of open-r1/codeforces with a prompt; None, to leave it out, without tests over stdin."""
    if record.get("interaction_format") or record.get("input_mode", "stdio") != "stdio" or not record["official_tests"]:
        return None
    parts = {"": record["description"], "Input": record.get("input_format"), "Output": record.get("output_format")}
    for number, case in enumerate(record.get("examples") or (), start=1):
        parts |= {f"Input of example {number}": case["input"], f"Output of example {number}": case["output"]}
    parts["Note"] = record.get("note")
    texts = [f"{name}\n{text.strip()}".strip() for name, text in parts.items() if text]
    return record | {"prompt": "\n\n".join([*texts, PROGRAM_INSTRUCTION])}
