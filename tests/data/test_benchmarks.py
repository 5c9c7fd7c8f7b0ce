"""Records of published benchmarks, by the fields of their sets, as prompts."""

import json
import string
from collections import Counter

import pytest

from verl_mg.config import DataConfig
from verl_mg.data import read_prompts
from verl_mg.data.benchmarks import codeforces, gpqa, livecodebench
from verl_mg.errors import UserError
from verl_mg.models.tiny_model import character_tokenizer


def question(i: int) -> dict[str, str]:
    wrong = {f"Incorrect Answer {n}": f" wrong {n} of {i}\n" for n in (1, 2, 3)}
    return {"Question": f"Question {i}?\n", "Correct Answer": f"right {i}", **wrong}


def test_gpqa_choices_have_an_order_of_their_question():
    records = [gpqa(question(i)) for i in range(200)]
    for i, record in enumerate(records):
        assert f"\n{record['answer']}) right {i}\n" in record["prompt"] + "\n"
        assert sorted(record["choices"]) == sorted([f"right {i}", *(f"wrong {n} of {i}" for n in (1, 2, 3))])
    counts = Counter(record["answer"] for record in records)
    assert set(counts) == set("ABCD") and max(counts.values()) < 75
    assert gpqa(question(7) | {"Record ID": "other"})["prompt"] == records[7]["prompt"]


def test_contest_records_have_prompts_and_keep_their_tests():
    record = {"question_content": "Double n. ", "starter_code": "", "public_test_cases": "[]"}
    assert livecodebench(record)["prompt"].startswith("Double n.\n\nWrite a Python program")
    assert livecodebench(record)["public_test_cases"] == "[]"
    assert "def f(n):\n```" in livecodebench(record | {"starter_code": "def f(n):\n"})["prompt"]
    problem = {
        "description": "Double n.",
        "input_format": "One number.",
        "output_format": "Its double.",
        "examples": [{"input": "1", "output": "2"}],
        "official_tests": [{"input": "3", "output": "6"}],
        "interaction_format": None,
        "input_mode": "stdio",
        "note": None,
    }
    prompt = codeforces(problem)["prompt"]
    assert "Output of example 1\n2" in prompt and "6" not in prompt and "Note" not in prompt
    for change in ({"input_mode": "file"}, {"interaction_format": "Ask."}, {"official_tests": []}):
        assert codeforces(problem | change) is None


def test_prepare_makes_the_records_of_a_source(tmp_path):
    tokenizer = character_tokenizer(string.printable)
    file, functions = tmp_path / "q.jsonl", tmp_path / "mine.py"
    file.write_text("".join(json.dumps(question(i)) + "\n" for i in range(3)))
    functions.write_text(
        "def some(record):\n    n = record['Question'][9]\n    return {'prompt': n, 'answer': n} if n != '1' else None"
        "\n"
        "def none(record): return None\ndef number(record): return 1\ndef fails(record): return record['x']\n"
    )

    def read(name: str):
        data = DataConfig(train=file, max_prompt_tokens=2000, test={"q": {"path": str(file), "prepare": name}})
        return list(read_prompts(data, "test", tokenizer))

    assert [(prompt.text, prompt.answer, prompt.place[-2:]) for prompt in read(f"{functions}:some")] == [
        ("0", "0", ":1"),
        ("2", "2", ":3"),
    ]
    assert read("verl_mg.data.benchmarks:gpqa")[0].record["Correct Answer"] == "right 0"
    for name, message in (
        ("none", "left out this"),
        ("number", "returned a int"),
        ("fails", "q.jsonl:1: .*KeyError: 'x'"),
    ):
        with pytest.raises(UserError, match=message):
            read(f"{functions}:{name}")
