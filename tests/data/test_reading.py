"""The data section of a configuration, from YAML to prompts."""

import json
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from tests.helpers.json_lines import write_lines
from verl_mg.config import DataConfig, RecipeConfig, dump_config, load_config
from verl_mg.data import Curriculum, Mixture, PromptSet, read_prompts
from verl_mg.data.benchmarks import codeforces, gpqa, livecodebench
from verl_mg.errors import UserError
from verl_mg.models.tiny_model import character_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer("abcdefgh!?")


@pytest.fixture
def files(tmp_path) -> Path:
    rows = {
        "one": [{"prompt": "aaaa", "answer": "b"}, {"prompt": "a"}, {"prompt": "aa"}],
        "two": [{"q": "c", "a": 1}, {"q": "d", "a": 2}],
    }
    for name, records in rows.items():
        write_lines(tmp_path / f"{name}.jsonl", records)
    return tmp_path


def both(files: Path) -> dict[str, Any]:
    return {
        "one": {"path": str(files / "one.jsonl"), "weight": 2},
        "two": {"path": str(files / "two.jsonl"), "prompt_field": "q", "answer_field": "a", "instruction": ""},
    }


def config(**data: Any) -> DataConfig:
    return DataConfig.model_validate({"max_prompt_tokens": 3, "overlong_prompts": "drop", "instruction": "!"} | data)


def test_read_prompts_path_gives_a_prompt_set(files, tokenizer):
    prompts = read_prompts(config(train=files / "one.jsonl"), "train", tokenizer, seed=3)
    assert isinstance(prompts, PromptSet)
    assert [(p.id, p.text, p.source) for p in prompts] == [(1, "a!", ""), (2, "aa!", "")]
    assert prompts.dropped == 1
    assert prompts.state()["seed"] == 3


def test_read_prompts_sources_give_a_mixture(files, tokenizer):
    data = config(train=both(files), test=both(files))
    prompts = read_prompts(data, "train", tokenizer)
    assert isinstance(prompts, Mixture)
    # The row that was dropped keeps its id, so what follows does not depend on the limit.
    result = [(p.id, p.source, p.text, p.answer) for p in prompts]
    assert result == [(1, "one", "a!", None), (2, "one", "aa!", None), (3, "two", "c", "1"), (4, "two", "d", "2")]
    assert prompts.by_id(4).place == f"{files}/two.jsonl:2"
    assert (prompts.dropped, [p.source for p in prompts.take(6)]) == (1, ["one", "two", "one"] * 2)
    assert [p.id for p in read_prompts(data, "test", tokenizer).first(1)] == [1, 3]


def test_read_prompts_band_gives_a_curriculum(files, tokenizer):
    data = config(train=both(files), test=files / "one.jsonl", curriculum={"low": 0.1, "revisit": 2})
    prompts = read_prompts(data, "train", tokenizer)
    assert isinstance(prompts, Curriculum)
    assert len(prompts) == 4
    assert isinstance(read_prompts(data, "test", tokenizer), PromptSet)


def test_read_prompts_bad_line_of_a_source_is_named(files, tokenizer):
    sources = both(files)
    del sources["two"]["prompt_field"]
    with pytest.raises(UserError, match=r"two\.jsonl:1: no field 'prompt'.*: q, a"):
        read_prompts(config(train=sources), "train", tokenizer)
    with pytest.raises(UserError, match=r"data\.test: not set"):
        read_prompts(config(train=sources), "test", tokenizer)


class Nothing(RecipeConfig):
    pass


def loaded(folder: Path, data: Any, *overrides: str) -> DataConfig:
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": "m"}, "data": data}))
    return load_config(path, list(overrides), Nothing).data


def test_load_config_sources_and_overrides_are_merged(tmp_path):
    data = loaded(tmp_path, {"train": {"a": {"path": "x.jsonl"}, "b": {"path": "y"}}}, "data.train.b.weight=0.5")
    assert isinstance(data.train, dict)
    assert [(name, s.path, s.weight, s.prompt_field) for name, s in data.train.items()] == [
        ("a", Path("x.jsonl"), 1.0, None),
        ("b", Path("y"), 0.5, None),
    ]
    assert loaded(tmp_path, {"train": {"a": {"path": "x"}}}, "data.train=z", "data.test=null").train == Path("z")


def test_dump_config_sources_read_back_equal(tmp_path):
    path = tmp_path / "c.yaml"
    data = {"train": {"a": {"path": "x", "weight": 0.3}}, "test": "t", "curriculum": {"high": 0.9}}
    path.write_text(yaml.safe_dump({"model": {"path": "m"}, "data": data}))
    first = load_config(path, [], Nothing)
    path.write_text(dump_config(first))
    assert load_config(path, [], Nothing).model_dump() == first.model_dump()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train={}", "data.train: {} is invalid: .* Write a path, or NAME: {path: ...} for each source"),
        ("data.train=null", "data.train: None is invalid: .* Write a path"),
        ("data.test=3", "data.test: 3 is invalid: .* Write a path"),
        ("data.train={a: x}", "data.train.a: 'x' is invalid: not a mapping. Write {path: ...}"),
        ("data.train={a: {weight: 1}}", "data.train.a.path: missing"),
        ("data.train={a: {path: x, weight: 0}}", "data.train.a.weight: 0 is invalid. Write a value greater than 0"),
        ("data.train={a: {path: x, weigth: 1}}", "data.train.a.weigth: unknown key. .* data.train.a.weight"),
        ("data.curriculum.lo=1", "data.curriculum.lo: unknown key. Did you mean data.curriculum.low"),
        ("data.curriculum={low: 0.5, high: 0.4}", "data.curriculum.high: 0.4 is invalid: smaller than low"),
        ("data.rejected_field=chosen", "data.rejected_field: 'chosen' is invalid: the same as chosen_field"),
    ],
)
def test_load_config_wrong_setting_is_named(tmp_path, override, message):
    with pytest.raises(UserError, match=message) as caught:
        loaded(tmp_path, {"train": "x.jsonl"}, override)
    assert "\n" not in str(caught.value)


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


def test_digest_of_records_does_not_depend_on_where_they_are(tmp_path, tokenizer):
    def digest(folder: str, value: Any) -> str:
        file = tmp_path / folder / "data.parquet"
        file.parent.mkdir(exist_ok=True)
        value = f"{file.parent}/{value}" if isinstance(value, str) else value
        pq.write_table(pa.Table.from_pylist([{"prompt": "a", "extra": value}, {"prompt": "b", "extra": value}]), file)
        return read_prompts(DataConfig(train=file), "train", tokenizer).digests[""]

    for value, other in (("task", "task2"), (b"\x00\xff", b"\x00\xfe"), ({"a": 1.5, "b": 2.0}, {"a": 1.5, "b": 3.0})):
        assert digest("one", value) == digest("two", value)
        assert digest("one", value) != digest("one", other)
    assert digest("one", {"b": 2.0, "a": 1.5}) == digest("two", {"a": 1.5, "b": 2.0})
