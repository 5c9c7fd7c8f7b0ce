"""Recorded lengths: their files, and the tool that writes them from a run or from samples drawn now."""

import pyarrow
import pytest
from pyarrow import parquet

from tools import record_lengths
from verl_mg.errors import UserError
from verl_mg.planner.lengths import Length, longest_to, read_lengths, write_lengths


def test_read_lengths_returns_written_lengths(tmp_path):
    lengths = [Length(3, 40), Length(12, 1)]
    write_lengths(tmp_path / "lengths.txt", lengths, ["from a test", "twice"])
    assert read_lengths(tmp_path / "lengths.txt") == lengths
    assert (tmp_path / "lengths.txt").read_text().startswith("# from a test\n# twice\n3 40\n")


@pytest.mark.parametrize("line", ["", "3", "3 4 5", "3 x", "0 4", "3 -4", "3 4.5", "3 ²", "3 " + "9" * 5000])
def test_read_lengths_invalid_line_raises_with_its_number(tmp_path, line):
    file = tmp_path / "lengths.txt"
    file.write_text(f"# head\n3 4\n{line}\n")
    with pytest.raises(UserError, match="lengths.txt:3: .* two positive numbers"):
        read_lengths(file)


def test_read_lengths_empty_file_raises(tmp_path):
    (tmp_path / "empty.txt").write_text("# nothing\n")
    with pytest.raises(UserError, match="contains no lengths"):
        read_lengths(tmp_path / "empty.txt")
    with pytest.raises(UserError, match="not a readable file of lengths"):
        read_lengths(tmp_path / "nowhere.txt")


def test_longest_to_keeps_the_distribution():
    assert longest_to([Length(10, 90), Length(10, 10)], 1000) == [Length(100, 900), Length(100, 100)]
    assert longest_to([Length(1, 999), Length(1, 1)], 100) == [Length(1, 100), Length(1, 1)]


@pytest.fixture
def record(capsys):
    """A function that runs tools/record_lengths.py; it returns exit code, output and errors."""

    def run(*arguments):
        return record_lengths.main([*map(str, arguments)]), *capsys.readouterr()

    return run


def test_record_lengths_of_a_run_keeps_order_of_samples(record, tmp_path):
    folder = tmp_path / "run" / "samples"
    for i in (1, 2):
        (folder / f"{i:06d}").mkdir(parents=True)
        for rank in (0, 1):
            prompt, response = 10 * i + rank, 7 - rank
            row = {"iteration": i, "call": 0, "sample_id": 2 * i + rank, "prompt_length": prompt}
            table = pyarrow.Table.from_pylist([row | {"tokens": [0] * (prompt + response)}])
            parquet.write_table(table, folder / f"{i:06d}" / f"rank-{rank}.parquet")
    code, _, errors = record("--samples", folder, "--out", tmp_path / "lengths.txt")
    assert code == 0, errors
    assert read_lengths(tmp_path / "lengths.txt") == [Length(10, 7), Length(11, 6), Length(20, 7), Length(21, 6)]
    (folder / "000002" / "rank-2.parquet").write_text('{"iteration": 1, "sample_id": 3}\n')
    code, _, errors = record("--samples", folder, "--out", tmp_path / "other.txt")
    assert code == 2 and "rank-2.parquet: not the samples of a run" in errors
    assert not (tmp_path / "other.txt").exists()


def test_record_lengths_of_a_model_is_reproducible(record, tmp_path):
    options = ("--draw", 12, "--max-new-tokens", 256)
    for name in ("one", "two"):
        code, output, errors = record(*options, "--out", tmp_path / name)
        assert code == 0 and "12 responses: mean" in output, errors
    lengths = read_lengths(tmp_path / "one")
    assert lengths == read_lengths(tmp_path / "two") and len(lengths) == 12
    assert max(length.response for length in lengths) <= 256 and len({length.response for length in lengths}) > 3
