"""Comparison of the metrics of two runs."""

import json
from pathlib import Path

from tests.helpers.launched import finished
from tools.compare_metrics import compare, equal, read_metrics, read_renames, renamed

NAN = float("nan")


def write(folder: Path, *lines: dict[str, float]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def run(*arguments: object) -> tuple[int, str]:
    code, out, err = finished(["-m", "tools.compare_metrics", *map(str, arguments)])
    return code, out + err


def test_command_with_renames_and_times_finds_equal_runs(tmp_path):
    write(tmp_path / "old" / "a", {"step": 1, "kl/observed": 0.5, "sync/bytes": 3, "time/sync": 1.0, "x": NAN})
    write(tmp_path / "new" / "a", {"step": 1, "kl/mean": 0.5, "weight_sync/bytes": 3, "time/other": 2.0, "x": NAN})
    (tmp_path / "renames").write_text("kl/observed kl/mean\n\nsync/* weight_sync/*\n")
    code, output = run(tmp_path / "old", tmp_path / "new", "--renames", tmp_path / "renames")
    assert code == 0 and output == "a: 1 iterations, 4 metrics are equal\n"


def test_command_with_differences_reports_the_first_and_fails(tmp_path):
    old = write(tmp_path / "old", {"step": 1, "a": 1.0}, {"step": 2, "a": 1.0})
    new = write(tmp_path / "new", {"step": 1, "a": 1.0}, {"step": 2, "a": 1.0000001, "b": 1.0})
    code, output = run(old, new)
    assert code == 1
    assert "step 2: a was 1.0, is 1.0000001" in output and "step 2: b is only in the new run" in output
    write(tmp_path / "old" / "more", {"step": 1})
    assert "more: only in" in run(old, new)[1]


def test_compare_with_tolerance_accepts_small_differences():
    old, new = [{"step": 1, "a": 1.0}], [{"step": 1, "a": 1.00001}]
    assert list(compare(old, new)) and not list(compare(old, new, 1e-4))
    assert list(compare(old, [*new, *new], 1e-4)) == ["1 iterations before, 2 now"]


def test_equal_of_nan_and_null_accepts_only_themselves():
    assert equal(NAN, NAN, 0) and equal(None, None, 0)
    assert not equal(NAN, 0.0, 1) and not equal(None, NAN, 1)


def test_renamed_with_a_prefix_replaces_the_prefix_only(tmp_path):
    (tmp_path / "renames").write_text("a/* b/*\na/x c\n")
    renames = read_renames(tmp_path / "renames")
    assert [renamed(name, renames) for name in ("a/x", "a/y", "d")] == ["c", "b/y", "d"]


def test_read_metrics_without_machine_dependent_names(tmp_path):
    folder = write(tmp_path / "run", {"step": 1, "time/iteration": 2.0, "rollout/load_imbalance": 1.5, "a": 3.0})
    assert read_metrics(folder / "metrics.jsonl") == [{"step": 1, "a": 3.0}]
