"""Published sets become prompts: repetitions are dropped, answers are found, and sources are names of the hub."""

import json
from pathlib import Path

import pytest

from tests.helpers.hub_server import serving
from tests.helpers.launched import finished
from tests.helpers.published_rows import DAPO_ROWS, EURUS_ROWS, MATH_500_ROW, SUMS, TESTS, write_published
from tools import prepare_data
from verl_mg.data.hub_files import select
from verl_mg.hub import HubName

PUBLISHED_FILES = {
    "BytedTsinghua-SIA/DAPO-Math-17k": ["README.md", "data/dapo-math-17k.parquet"],
    "BytedTsinghua-SIA/AIME-2024": ["data/aime-2024.parquet"],
    "PRIME-RL/Eurus-2-RL-Data": ["train.parquet", "validation.parquet"],
    "DigitalLearningGmbH/MATH-lighteval": [
        *(f"data/{split}-00000-of-00001.parquet" for split in ("train", "test")),
        *(f"algebra/{split}-00000-of-00001.parquet" for split in ("train", "test")),
    ],
    "HuggingFaceH4/MATH-500": ["test.jsonl"],
    "ise-uiuc/Magicoder-OSS-Instruct-75K": ["data-oss_instruct-decontaminated.jsonl"],
    "theblackcat102/evol-codealpaca-v1": ["train.jsonl"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, list[Path]]:
    return write_published(tmp_path_factory.mktemp("published"))


def records_of(files: dict[str, list[Path]], name: str, out: Path, *more: str) -> list[dict[str, object]]:
    sources = [argument for file in files[name] for argument in ("--source", str(file))]
    assert prepare_data.main([name, "--out", str(out), *sources, *more]) == 0
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def test_prepared_dapo_has_each_prompt_once_in_the_published_words(files, tmp_path, capsys):
    records = records_of(files, "dapo_math_17k", tmp_path)
    assert [record["answer"] for record in records] == [str(a + b) for a, b in SUMS]
    assert [record["prompt"] for record in records] == [row["prompt"] for row in DAPO_ROWS]
    assert capsys.readouterr().out == f"{tmp_path}/dapo_math_17k.jsonl: {len(SUMS)} prompts of {3 * len(SUMS)} rows\n"
    assert [file.name for file in tmp_path.iterdir()] == ["dapo_math_17k.jsonl"]


def test_prepared_math_has_levels_3_to_5_without_math_500(files, tmp_path):
    held_out = str(files["math_500"][0])
    records = records_of(files, "math_level_3_to_5", tmp_path, "--without", held_out)
    assert [record["answer"] for record in records] == [*(str(a + b) for a, b in SUMS), "\\frac{1}{2}"]
    assert {record["level"] for record in records} == {3, 4, 5}
    system, user = records[-1]["prompt"]
    assert "\\boxed{}" in system["content"] and user["content"] == "What is $\\frac{1}{2}$?"
    (held,) = records_of(files, "math_500", tmp_path)
    assert held["answer"] == MATH_500_ROW["answer"] and held["prompt"][0] == system


def test_prepared_eurus_has_answers_or_tests(files, tmp_path):
    records = records_of(files, "eurus_2_rl", tmp_path)
    assert [record.get("answer") for record in records] == [*(str(a + b) for a, b in SUMS), None]
    assert [record.get("tests") for record in records] == [None] * len(SUMS) + [TESTS]
    assert [record["prompt"] for record in records] == [row["prompt"] for row in EURUS_ROWS]


def test_prepared_code_is_drawn_by_the_seed(files, tmp_path, monkeypatch):
    every = records_of(files, "code_instructions", tmp_path)
    assert len(every) == len(SUMS) + 1 and every[-1]["answer"] == "```python\nprint(1)\n```"
    chosen = prepare_data.PublishedSet(("",), prepare_data.code_row, drawn=3)
    sources = [str(file) for file in files["code_instructions"]]
    draws = [prepare_data.prepared(chosen, sources, "", seed)[0] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2] and len(draws[0]) == 3
    assert all(record in every for record in draws[0])


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("$\\boxed{1}$ and $\\boxed{\\frac{a}{b^{2}}}$.", "\\frac{a}{b^{2}}"),
        ("$\\boxed{3", None),
        ("none", None),
        ("", None),
        ("\\boxed{}", ""),
    ],
)
def test_last_boxed_has_balanced_braces(solution, answer):
    assert prepare_data.last_boxed(solution) == answer


@pytest.mark.parametrize("name", prepare_data.SETS)
def test_sources_name_one_split_of_the_published_files(name):
    chosen = prepare_data.SETS[name]
    for source in [*chosen.sources, *filter(None, [chosen.without])]:
        parsed = HubName.parse(source)
        assert parsed is not None
        found = select(parsed, PUBLISHED_FILES[parsed.repository], {})
        split = source.rpartition(":")[2] if ":" in source else ""
        assert len(found) == 1 and split in found[0] and "algebra" not in found[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["dapo_math_17k", "--source", "math_500.jsonl"],
            "math_500.jsonl:1: not a row of this set (KeyError: 'prompt')",
        ),
        (["math_500", "--source", "nowhere.jsonl"], "nowhere.jsonl: no such data file"),
        (["math_500", "aime_2024", "--source", "math_500.jsonl"], "Prepare the sets one by one"),
        (["math_level_3_to_5", "--source", "math_500.jsonl"], "none of 1 rows is part of this set"),
    ],
)
def test_unreadable_set_is_one_line_and_leaves_no_file(files, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(files["math_500"][0].parent)
    more = ["--without", "math_500.jsonl"] if arguments[0] == "math_level_3_to_5" else []
    assert prepare_data.main([*arguments, *more, "--out", str(tmp_path / "data")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1
    assert not (tmp_path / "data").exists()


@pytest.mark.nightly
def test_set_by_its_name_is_downloaded_once_and_then_read_from_the_cache_offline(files, tmp_path):
    data = files["dapo_math_17k"][0].read_bytes()
    with serving({}, {"BytedTsinghua-SIA/DAPO-Math-17k": {"data/dapo-math-17k.parquet": data}}) as hub:
        for offline in ("0", "1"):
            command = ["-m", "tools.prepare_data", "dapo_math_17k", "--out", str(tmp_path / offline)]
            variables = hub.variables(tmp_path / "home") | {"HF_HUB_OFFLINE": offline}
            finished(command, warm=False, **variables).completed()
        assert hub.downloads["data/dapo-math-17k.parquet"] == 1
    first, second = ((tmp_path / offline / "dapo_math_17k.jsonl").read_text() for offline in ("0", "1"))
    assert first == second and first.count("\n") == len(SUMS)
