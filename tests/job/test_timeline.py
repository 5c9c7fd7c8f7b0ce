"""The time line of a rank: one line an iteration, and neither a kill nor a bad disk spoils a run."""

import json

import pytest

from verl_mg import clock as clock_module
from verl_mg.clock import Clock
from verl_mg.job.records import timeline as module
from verl_mg.job.records.timeline import Timeline


@pytest.fixture
def now(monkeypatch):
    """Time that stands still until told; the wall clock is 1000 seconds ahead."""
    time = [100.0]
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: time[0])
    monkeypatch.setattr(module.time, "time", lambda: time[0] + 1000)
    return time


def lines(folder, rank=0):
    return [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]


def iteration_of(now, clock, *phases):
    for phase, seconds in phases:
        with clock(phase):
            now[0] += seconds


def test_a_line_an_iteration(now, tmp_path):
    clock = Clock()
    timeline = Timeline(tmp_path / "timeline", 3, clock)
    iteration_of(now, clock, ("generate", 1.25), ("sync", 0.5))
    timeline.write(1)
    now[0] += 0.25
    iteration_of(now, clock, ("update", 2.0))
    timeline.write(2)
    assert lines(tmp_path / "timeline", 3) == [
        {"iteration": 1, "start": 1100.0, "spans": [["generate", 0.0, 1.25], ["sync", 1.25, 1.75]]},
        {"iteration": 2, "start": 1101.75, "spans": [["update", 0.25, 2.25]]},
    ]


def test_a_resumed_run_does_iterations_again(now, tmp_path):
    clock = Clock()
    timeline = Timeline(tmp_path, 0, clock)
    for iteration in (1, 2, 3):
        iteration_of(now, clock, ("work", 1.0))
        timeline.write(iteration)
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"iteration": 4, "sta')
    again = Timeline(tmp_path, 0, clock, first_step=2)
    iteration_of(now, clock, ("update", 1.0))
    again.write(2)
    assert [(line["iteration"], line["spans"][0][0]) for line in lines(tmp_path)] == [(1, "work"), (2, "update")]
    assert [file.name for file in tmp_path.iterdir()] == ["rank-0.jsonl"]


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_bad_disk_warns_once_and_the_run_goes_on(now, tmp_path, caplog, when):
    folder, clock = tmp_path / "timeline", Clock()
    if when == "before":
        folder.write_text("a file where the folder should be")
    timeline = Timeline(folder, 0, clock)
    if when == "while":
        (folder / "rank-0.jsonl").mkdir()
    for iteration in (1, 2):
        iteration_of(now, clock, ("work", 1.0))
        timeline.write(iteration)
    assert len(caplog.records) == 1 and "no time line" in caplog.text
