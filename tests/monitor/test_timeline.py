"""The time line of a rank: one line an iteration, and neither a kill nor a bad disk spoils a run."""

import json

import pytest

from verl_mg import phase_timer as timer_module
from verl_mg.monitor import profile as module
from verl_mg.monitor.profile import Timeline
from verl_mg.phase_timer import PhaseTimer


@pytest.fixture
def now(monkeypatch):
    """Time that moves only when a test moves it; the wall clock is 1000 seconds ahead."""
    time = [100.0]
    monkeypatch.setattr(timer_module.time, "perf_counter", lambda: time[0])
    monkeypatch.setattr(module.time, "time", lambda: time[0] + 1000)
    return time


def lines(folder, rank=0):
    return [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]


def iteration_of(now, timer, *phases):
    for phase, seconds in phases:
        with timer(phase):
            now[0] += seconds


def test_timeline_writes_a_line_per_iteration(now, tmp_path):
    timer = PhaseTimer()
    timeline = Timeline(tmp_path / "timeline", 3, timer)
    iteration_of(now, timer, ("generate", 1.25), ("sync", 0.5))
    timeline.write(1)
    now[0] += 0.25
    iteration_of(now, timer, ("update", 2.0))
    timeline.write(2)
    assert lines(tmp_path / "timeline", 3) == [
        {"iteration": 1, "start": 1100.0, "spans": [["generate", 0.0, 1.25], ["sync", 1.25, 1.75]]},
        {"iteration": 2, "start": 1101.75, "spans": [["update", 0.25, 2.25]]},
    ]


def test_timeline_resumed_run_replaces_iterations(now, tmp_path):
    timer = PhaseTimer()
    timeline = Timeline(tmp_path, 0, timer)
    for iteration in (1, 2, 3):
        iteration_of(now, timer, ("work", 1.0))
        timeline.write(iteration)
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"iteration": 4, "sta')
    again = Timeline(tmp_path, 0, timer, first_step=2)
    iteration_of(now, timer, ("update", 1.0))
    again.write(2)
    assert [(line["iteration"], line["spans"][0][0]) for line in lines(tmp_path)] == [(1, "work"), (2, "update")]
    assert [file.name for file in tmp_path.iterdir()] == ["rank-0.jsonl"]


@pytest.mark.parametrize("when", ["before", "while"])
def test_timeline_disk_error_warns_once(now, tmp_path, caplog, when):
    folder, timer = tmp_path / "timeline", PhaseTimer()
    if when == "before":
        folder.write_text("a file where the folder should be")
    timeline = Timeline(folder, 0, timer)
    if when == "while":
        (folder / "rank-0.jsonl").mkdir()
    for iteration in (1, 2):
        iteration_of(now, timer, ("work", 1.0))
        timeline.write(iteration)
    assert len(caplog.records) == 1 and "the timeline of this rank ends here" in caplog.text
