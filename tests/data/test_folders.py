"""A path is a file, the shards of a folder, a pattern, or a saved dataset; anything else is named with its remedy."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc

from tests.helpers.json_lines import write_lines
from tests.helpers.published_rows import write_parquet
from verl_mg.data import read_records
from verl_mg.data.hub_files import select
from verl_mg.data.records import located_records
from verl_mg.errors import UserError
from verl_mg.hub import HubName

ROWS = [{"prompt": f"p{i}", "messages": [{"role": "user", "content": f"c{i}"}]} for i in range(5)]


def stream(path: Path, rows: list[dict[str, Any]]) -> None:
    arrow = pa.Table.from_pylist(rows)
    with ipc.new_stream(path, arrow.schema) as file:
        file.write_table(arrow)


def saved_by_hand(folder: Path) -> Path:
    """What `save_to_disk` writes, so much of it as is read; the files' own order is not that of their names."""
    folder.mkdir()
    stream(folder / "b.arrow", ROWS[:2])
    stream(folder / "a.arrow", ROWS[2:])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.mark.parametrize(("kind", "write"), [(".jsonl", write_lines), (".parquet", write_parquet)])
def test_read_records_folder_of_shards_is_read_by_name(tmp_path, kind, write):
    for number, part in ((1, ROWS[3:]), (0, ROWS[:3])):
        write(tmp_path / f"train-0000{number}-of-00002{kind}", part)
    (tmp_path / f".train-00002-of-00002{kind}").write_text("a copy half made")
    (tmp_path / "README.md").write_text("not data")
    assert read_records(tmp_path) == ROWS
    last, _ = located_records(tmp_path)[-1]
    assert last == f"{tmp_path}/train-00001-of-00002{kind}:2"


def test_read_records_saved_dataset_has_the_order_of_its_state(tmp_path):
    assert read_records(saved_by_hand(tmp_path / "d")) == ROWS


def test_read_records_datasets_of_hugging_face_are_read(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "whole", num_shards=2)
    whole.select([3, 1]).save_to_disk(tmp_path / "some")
    datasets.DatasetDict(train=whole, test=whole.select([0])).save_to_disk(tmp_path / "splits")
    datasets.Dataset.from_list([]).save_to_disk(tmp_path / "empty")
    assert read_records(tmp_path / "whole") == ROWS
    assert located_records(tmp_path / "whole")[4][0].endswith("data-00001-of-00002.arrow:2")
    assert read_records(tmp_path / "some") == [ROWS[3], ROWS[1]]
    assert read_records(tmp_path / "splits" / "test") == ROWS[:1]
    with pytest.raises(UserError, match=rf"several splits \(train, test\)\. .* as {tmp_path}/splits/train"):
        read_records(tmp_path / "splits")
    with pytest.raises(UserError, match="contains no records"):
        read_records(tmp_path / "empty")


def test_read_records_pattern_reads_matching_files(tmp_path):
    for name in ("train-1", "train-0", "test-0"):
        write_lines(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    assert [row["prompt"] for row in read_records(tmp_path / "train-*.jsonl")] == ["train-0", "train-1"]
    assert len(read_records(tmp_path / "*.jsonl")) == 3
    with pytest.raises(UserError, match="no file matches"):
        read_records(tmp_path / "dev-*.jsonl")
    (tmp_path / "train-0.csv").write_text("")
    with pytest.raises(UserError, match=r"train-0\.csv: .*ends in '\.csv'"):
        read_records(tmp_path / "train-*")


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([], r"contains no \.jsonl or \.parquet files"),
        (["train.jsonl", "test.jsonl"], r"not shards of one set \(test\*\.jsonl, train\*\.jsonl\)\. .*/test\*\.jsonl"),
        (["gsm8k_train.jsonl", "gsm8k_test.jsonl"], "not shards of one set"),
        (["train.jsonl", "train.parquet"], r"train\*\.jsonl, train\*\.parquet"),
        (["train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"], "not shards of one set"),
        (["train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"], r"2 of 3 shards .*pattern .*/\*\.jsonl"),
    ],
)
def test_read_records_folder_of_other_than_one_set_is_refused(tmp_path, names, reason):
    for name in names:
        (write_lines if name.endswith("l") else write_parquet)(tmp_path / name, ROWS)
    with pytest.raises(UserError, match=reason) as caught:
        read_records(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: ")


@pytest.mark.parametrize(
    "names",
    [
        ["shard0", "shard1", "shard12"],
        ["0001", "0002"],
        ["part-00000-3fa8-c000.snappy", "part-00001-77e1-c000.snappy"],
        ["train-00000-of-00002-ab12", "train-00001-of-00002-cd34"],
    ],
)
def test_read_records_usual_shard_names_are_one_set(tmp_path, names):
    for name in names:
        write_lines(tmp_path / f"{name}.jsonl", ROWS)
    assert len(read_records(tmp_path)) == len(names) * len(ROWS)


def test_read_records_bad_line_of_a_shard_is_named(tmp_path):
    write_lines(tmp_path / "a0.jsonl", ROWS)
    (tmp_path / "a1.jsonl").write_text('{"prompt": 1}\n{"prompt"\n')
    with pytest.raises(UserError, match="not JSON") as caught:
        read_records(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/a1.jsonl:2: ")


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("state.json", "{", r"state\.json: not readable JSON"),
        ("state.json", "[]", r"state\.json: has no list _data_files"),
        ("state.json", '{"_data_files": [{"filename": "c.arrow"}]}', r"c\.arrow of its state\.json is missing"),
        ("a.arrow", "no stream", r"a\.arrow: not a readable Arrow file"),
        ("dataset_dict.json", "{}", r"several splits .*/d/train"),
    ],
)
def test_read_records_broken_saved_dataset_is_named(tmp_path, file, text, reason):
    folder = saved_by_hand(tmp_path / "d")
    (folder / file).write_text(text)
    with pytest.raises(UserError, match=reason) as caught:
        read_records(folder)
    assert "\n" not in str(caught.value)


SPLITS = ("train", "test")
GSM8K = [f"{config}/{split}-00000-of-00001.parquet" for config in ("main", "socratic") for split in ("test", "train")]
"""Files of openai/gsm8k."""
GSM8K_CARD = {
    "configs": [
        {"config_name": name, "data_files": [{"split": split, "path": f"{name}/{split}-*"} for split in SPLITS]}
        for name in ("main", "socratic")
    ]
}
DEFAULT = {"configs": [{"config_name": "default", "data_files": [{"split": "train", "path": ["./a.jsonl", "b/*"]}]}]}
FOLDER = {"configs": [{"config_name": "x", "data_dir": "sub", "data_files": "*.jsonl"}]}


def selected(text: str, files: list[str], card: dict[str, Any]) -> list[str]:
    name = HubName.parse(text)
    assert name
    return select(name, files, card)


@pytest.mark.parametrize("card", [GSM8K_CARD, {}], ids=["card", "no card"])
def test_select_configuration_and_split_gives_their_files(card):
    assert selected("openai/gsm8k:main:train", ["README.md", *GSM8K], card) == ["main/train-00000-of-00001.parquet"]
    assert selected("hf:openai/gsm8k:socratic:test", GSM8K, card) == ["socratic/test-00000-of-00001.parquet"]


@pytest.mark.parametrize(
    ("text", "files", "card", "expected"),
    [
        ("a/b", ["train.jsonl", "README.md"], {}, ["train.jsonl"]),
        ("a/b", ["data.jsonl"], {}, ["data.jsonl"]),
        ("a/b::test", ["data/train-0.parquet", "data/test-0.parquet"], {}, ["data/test-0.parquet"]),
        ("a/b:main:train", ["main/train/0000.parquet", "main/test/0000.parquet"], {}, ["main/train/0000.parquet"]),
        ("a/b", ["train.jsonl", "train.parquet", ".x.jsonl"], {}, ["train.parquet"]),
        ("a/b::train", ["train.parquet", "val.parquet", "eval.parquet", "Test.parquet"], {}, ["train.parquet"]),
        ("a/b", ["dataset_infos.json", "train.json"], {}, ["train.json"]),
        ("a/b", ["dataset_info.json", "state.json", "data-0-of-1.arrow"], {}, ["data-0-of-1.arrow"]),
        ("a/b", ["a.jsonl", "b/0.jsonl", "c.jsonl"], DEFAULT, ["a.jsonl", "b/0.jsonl"]),
        ("a/b", ["sub/1.jsonl", "0.jsonl"], FOLDER, ["sub/1.jsonl"]),
        ("a/b", ["train.jsonl"], {"configs": [{"config_name": "x"}, "y"]}, ["train.jsonl"]),
    ],
)
def test_select_of_the_only_set_needs_no_part(text, files, card, expected):
    assert selected(text, files, card) == expected


@pytest.mark.parametrize(
    ("text", "files", "card", "reason"),
    [
        ("a/b", GSM8K, GSM8K_CARD, r"several configurations \(main, socratic\). Write one of: a/b:main, a/b:socratic"),
        ("a/b:main", GSM8K, {}, r"several splits \(test, train\). Write one of: a/b:main:test, a/b:main:train"),
        ("a/b:other", GSM8K, {}, "a/b: has no configuration 'other'. Write one of: a/b:main, a/b:socratic"),
        ("a/b@v1:main:dev", GSM8K, {}, "a/b@v1: has no split 'dev'. Write one of: a/b@v1:main:test, a/b@v1:main:train"),
        ("a/b", ["a.csv", "b.zip", "README.md"], {}, r"kinds are: .csv, .zip\). Write hf:a/b@refs/convert/parquet"),
        ("a/b", ["x.jsonl"], DEFAULT, "no readable file matches"),
    ],
)
def test_select_of_an_unknown_part_names_the_known_ones(text, files, card, reason):
    with pytest.raises(UserError, match=reason):
        selected(text, files, card)
