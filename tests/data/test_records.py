"""Records come as written; what is not a record is named by its line."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from verl_mg.data import read_records
from verl_mg.errors import UserError

RECORDS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "ü\u2028\n", "answer": None}]


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_read_records_blank_lines_are_skipped(tmp_path: Path, suffix: str) -> None:
    lines = "\n   \n\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS)
    assert read_records(written(tmp_path / f"data{suffix}", lines + "\n")) == RECORDS


def test_read_records_parquet_file_is_read(tmp_path: Path) -> None:
    records = [{"prompt": [{"role": "user", "content": "hi"}], "n": 3}, {"prompt": [], "n": 4}]
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "data.parquet")
    assert read_records(tmp_path / "data.parquet") == records


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [('{"a": 1}\n\n{"a": \n', 3, "not JSON"), ('{"a": 1}\n[1]\n', 2, "a JSON list, not an object")],
)
def test_read_records_bad_line_is_named(tmp_path: Path, text: str, line: int, reason: str) -> None:
    path = written(tmp_path / "data.jsonl", text)
    with pytest.raises(UserError) as caught:
        read_records(path)
    assert str(caught.value).startswith(f"{path}:{line}: {reason}")
    assert '{"prompt": "..."}' in str(caught.value)


def test_read_records_invalid_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(UserError, match=r"data\.jsonl:2: not UTF-8"):
        read_records(tmp_path / "data.jsonl")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("missing.jsonl", None, "no such data file"),
        ("data.csv", "a,b\n", r"ends in '\.csv'"),
        ("empty.jsonl", "\n \n", "contains no records"),
        ("data.parquet", "no parquet", "not a readable Parquet file"),
    ],
)
def test_read_records_bad_file_is_named(tmp_path: Path, name: str, text: str | None, reason: str) -> None:
    path = tmp_path / name if text is None else written(tmp_path / name, text)
    with pytest.raises(UserError, match=reason) as caught:
        read_records(path)
    assert str(caught.value).startswith(str(path))
