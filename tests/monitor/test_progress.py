"""The summary at the end of a run, from its metrics."""

from verl_mg.jsonl import read_lines
from verl_mg.monitor.progress import summary


def test_summary_of_a_run_has_four_lines():
    lines = [
        {"step": 0, "eval/reward": 0.125},
        {"step": 1, "time/iteration": 30.0, "time/tokens_per_second": 100.0, "reward/mean": 0.25},
        {"step": 2, "time/iteration": 90.0, "time/tokens_per_second": 300.0, "reward/mean": 0.75, "eval/reward": 0.5},
        {"step": 3, "time/iteration": 30.0, "time/tokens_per_second": 300.0, "reward/mean": None},
        {"step": 4, "time/iteration": 30.0, "time/tokens_per_second": 300.0, "reward/mean": 0.5},
    ]
    assert summary(lines).splitlines() == [
        "4 iterations in 0:03:00",
        "tokens/s  267 on average",
        "reward    0.25 in iteration 1, 0.5 in 4; best 0.75 in 2",
        "eval      0.125 in iteration 0 -> 0.5 in 2",
    ]


def test_summary_without_metrics_omits_lines():
    assert summary([{"step": 1, "time/iteration": 1.0, "actor/loss": 2.0}]) == "1 iteration in 0:00:01"
    assert summary([]) == "0 iterations in 0:00:00"


def test_read_lines_incomplete_line_is_ignored(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"ste')
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1}]
    assert read_lines(tmp_path / "none.jsonl") == []
