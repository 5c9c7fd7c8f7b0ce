"""What is logged can be read back, bit for bit; the console shows it on a terminal and beside one."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from verl_mg.job.curve import draw_curve
from verl_mg.job.trace import SampleTrace
from verl_mg.job.trackers import ConsoleTracker, JsonlTracker, TensorBoardTracker, Tracker


def read(path: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(100) * 1e-5
    tracker: Tracker = JsonlTracker(tmp_path / "new" / "metrics.jsonl")
    tracker.log(1, {str(i): value for i, value in enumerate(values)})
    lines = read(tmp_path / "new" / "metrics.jsonl")  # before it is closed
    tracker.close()
    assert lines == [{"step": 1} | {str(i): float(value) for i, value in enumerate(values)}]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {"a": math.nan, "b": -math.inf, "c": np.float32(0.1)})
    tracker.close()
    assert read(tmp_path / "metrics.jsonl") == [
        {"step": 1, "a": None, "b": None, "c": float(np.float32(0.1))}
    ]


@pytest.mark.parametrize(("first_step", "steps"), [(3, [1, 2, 3]), (None, [1, 2, 3, 4, 3])])
def test_resumed_file_has_no_torn_and_no_repeated_line(
    tmp_path: Path, first_step: int | None, steps: list[int]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {i}}}\n' for i in range(1, 5)) + '{"step": 5, "lo')
    tracker = JsonlTracker(path, first_step)
    tracker.log(3, {})
    tracker.close()
    assert [line["step"] for line in read(path)] == steps
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker: Tracker = TensorBoardTracker(tmp_path)
    tracker.log(1, {"reward/mean": 0.25})
    tracker.log(2, {"reward/mean": 0.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def shown(terminal: bool) -> str:
    screen = io.StringIO()
    tracker: Tracker = ConsoleTracker(
        20, "grpo [x]", first_step=11, console=Console(file=screen, force_terminal=terminal, width=140)
    )
    tracker.log(11, {"reward/mean": 0.12345, "reward/max": 7.5, "eval/reward": 0.5})
    tracker.log(12, {})
    tracker.close()
    return screen.getvalue()


def test_plain_lines_beside_a_terminal() -> None:
    first, second = shown(terminal=False).splitlines()
    assert first.startswith("step 11/20  reward 0.1235  eval 0.5  elapsed 0:00:0")
    assert second.startswith("step 12/20  elapsed") and "eta 0:00:0" in second
    assert "\x1b" not in first + second


def test_live_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = shown(terminal=True)
    assert "\x1b" in text and "12/20" in text and "reward 0.1235  eval 0.5" in text


def test_curve(tmp_path: Path) -> None:
    from matplotlib.image import imread

    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in range(1, 30):
        tracker.log(step, {"reward/mean": math.nan if step == 3 else step / 30})
    tracker.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "rew')
    path = draw_curve(tmp_path / "metrics.jsonl", tmp_path / "plots" / "curve.png", title="a run")
    assert path == tmp_path / "plots" / "curve.png"
    picture = imread(path)
    assert picture.shape[:2] == (675, 1200)
    assert picture[..., :3].min() < 0.5 < picture[..., :3].mean()  # ink on a light ground


def test_no_curve_without_its_series(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "reward/mean": null}\n')
    assert draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png") is None
    assert not (tmp_path / "curve.png").exists()


def test_running_mean_against_a_loop() -> None:
    from verl_mg.job.curve import _running_mean

    values = np.random.default_rng(0).standard_normal(35)
    np.testing.assert_allclose(
        _running_mean(values), [values[max(0, i - 2) : i + 1].mean() for i in range(35)], rtol=1e-12
    )


def test_trace_appends_a_line_a_sample(tmp_path: Path) -> None:
    records = [
        {"step": 1, "response": "ü\n\u2028"},
        {"step": 1, "response": ""},
        {"step": 2, "response": "x"},
    ]
    trace = SampleTrace(tmp_path / "samples", rank=3)
    trace.write(records[:2])
    lines = (tmp_path / "samples" / "rank-3.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines[:-1]] == records[:2]
    trace.close()
    trace = SampleTrace(tmp_path / "samples", rank=3)
    trace.write(iter(records[2:]))
    trace.close()
    lines = (tmp_path / "samples" / "rank-3.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines[:-1]] == records
