"""The time line of a rank: spans of phases, one line an iteration, and neither a kill nor a bad disk spoils a run."""

import json

import pytest

from verl_mg import clock as clock_module
from verl_mg.clock import MOST_SPANS, Clock
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


def test_spans_are_those_of_the_innermost_phase(now):
    clock = Clock()
    with clock("work"):
        now[0] += 1
    assert clock.take_spans() == []  # kept from here on
    with clock("recipe"):
        now[0] += 1
        with clock("rows"):
            now[0] += 2
        with clock("rows"):
            now[0] += 4
        now[0] += 8
    now[0] += 16
    with clock("recipe"):
        now[0] += 32
    assert clock.take_spans() == [
        ("recipe", 101, 102),
        ("rows", 102, 108),  # two that touch are one, and nothing of no length lies between them
        ("recipe", 108, 116),
        ("recipe", 132, 164),
    ]
    assert clock.take_spans() == []


def test_of_very_many_spans_the_longest_stay_in_order(now):
    clock = Clock()
    clock.take_spans()
    for i in range(10 * MOST_SPANS):
        iteration_of(now, clock, ("rows", 5.0 if i % 100 == 0 else 0.5), ("work", 0.5))
    spans = clock.take_spans()
    assert MOST_SPANS // 2 <= len(spans) <= MOST_SPANS
    assert sum(end - begin == 5.0 for _, begin, end in spans) == MOST_SPANS // 10 + 1
    assert spans == sorted(spans, key=lambda span: span[1])


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
