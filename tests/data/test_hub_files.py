"""Configurations and splits of data sets are those of their card, or else of the names of folders and files."""

from typing import Any

import pytest

from verl_mg.data.hub_files import select
from verl_mg.errors import UserError
from verl_mg.hub import HubName

GSM8K = [f"{config}/{split}-00000-of-00001.parquet" for config in ("main", "socratic") for split in ("test", "train")]
"""Files of openai/gsm8k."""
GSM8K_CARD = {
    "configs": [
        {
            "config_name": config,
            "data_files": [{"split": split, "path": f"{config}/{split}-*"} for split in ("train", "test")],
        }
        for config in ("main", "socratic")
    ]
}
DEFAULT = {"configs": [{"config_name": "default", "data_files": [{"split": "train", "path": ["./a.jsonl", "b/*"]}]}]}
FOLDER = {"configs": [{"config_name": "x", "data_dir": "sub", "data_files": "*.jsonl"}]}


def selected(text: str, files: list[str], card: dict[str, Any]) -> list[str]:
    name = HubName.parse(text)
    assert name
    return select(name, files, card)


@pytest.mark.parametrize("card", [GSM8K_CARD, {}], ids=["card", "no card"])
def test_select_configuration_and_split_gives_their_files(card: dict[str, Any]) -> None:
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
def test_select_of_the_only_set_needs_no_part(
    text: str, files: list[str], card: dict[str, Any], expected: list[str]
) -> None:
    assert selected(text, files, card) == expected


@pytest.mark.parametrize(
    ("text", "files", "card", "reason"),
    [
        (
            "a/b",
            GSM8K,
            GSM8K_CARD,
            r"a/b: has several configurations \(main, socratic\). Write one of: a/b:main, a/b:so",
        ),
        (
            "a/b:main",
            GSM8K,
            {},
            r"a/b: has several splits \(test, train\). Write one of: a/b:main:test, a/b:main:train",
        ),
        ("a/b:other", GSM8K, {}, "a/b: has no configuration 'other'. Write one of: a/b:main, a/b:socratic"),
        ("a/b@v1:main:dev", GSM8K, {}, "a/b@v1: has no split 'dev'. Write one of: a/b@v1:main:test, a/b@v1:main:train"),
        ("a/b", ["a.csv", "b.zip", "README.md"], {}, r"kinds are: .csv, .zip\). Write hf:a/b@refs/convert/parquet"),
        ("a/b", ["x.jsonl"], DEFAULT, "no readable file matches"),
    ],
)
def test_select_of_an_unknown_part_names_the_known_ones(
    text: str, files: list[str], card: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        selected(text, files, card)
