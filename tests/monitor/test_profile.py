"""Phases of an iteration: their table, their timeline, and traces of selected iterations."""

import contextlib
import gzip
import io
import json
import re

import pytest

from tests.helpers.json_lines import read_lines
from tests.run.jobs import GRPO, job
from verl_mg import phase_timer as timer_module
from verl_mg.config import ProfileConfig
from verl_mg.errors import UserError
from verl_mg.monitor import run_logger as module
from verl_mg.monitor.run_logger import INEXACT, Profile, Timeline, TorchProfile, check_profile, format_table
from verl_mg.phase_timer import PhaseTimer


def test_format_table_of_two_ranks_adds_up():
    first = {"generate": 6.0, "update": 2.0, "row_dispatch": 1.0}
    second = {"generate": 4.0, "update": 2.0, "wait_generate": 2.0, "row_dispatch": 3.0}
    assert format_table([first, second]).splitlines() == [
        "phase              mean s     max s    share",
        "generate            5.000     6.000    50.0%",
        "row_dispatch        2.000     3.000    20.0%",
        "update              2.000     2.000    20.0%",
        "wait_generate       1.000     2.000    10.0%",
        "total              10.000    11.000   100.0%",
        "compute (generate, forward, update, optimizer) 70.0%, waiting for other ranks 10.0%, "
        "overhead 2.000 of 10.000 s, 20.0% of an iteration",
    ]


def means_over_iterations():
    timer = PhaseTimer()
    profile = Profile(timer)
    for seconds in ({"update": 100.0}, {"update": 1.0, "row_dispatch": 1.0}, {"update": 3.0}):
        timer.seconds = dict(seconds)
        assert profile.iteration() == {f"time/phase/{name}": value for name, value in sorted(seconds.items())}
    assert profile.table(exact=False).splitlines()[-1] == INEXACT
    return profile.table()


def nothing_done():
    return Profile(PhaseTimer()).table()


def test_table_without_iterations_is_empty(ranks):
    assert ranks.run(2, nothing_done) == ["", ""]


def test_table_excludes_the_first_iteration(ranks):
    for table in ranks.run(2, means_over_iterations):
        assert re.search(r"^update +2\.000 +2\.000 +80\.0%$", table, re.M)
        assert "0.500 of 2.500 s, 20.0% of an iteration" in table


def output_of(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        job(*arguments)
    return output.getvalue()


def test_run_prints_its_phases(ranks, inputs, tmp_path):
    placement = ["reference.ranks=1", "actor.ranks=0", "profile.synchronize=true"]
    output, output_of_rank_1 = ranks.run(2, output_of, "grpo", inputs, tmp_path / "run", [*GRPO, *placement])
    assert "phase" not in output_of_rank_1
    phases = set(re.findall(r"^(\w+) +\d+\.\d+ +\d+\.\d+ +\d+\.\d%$", output, re.M))
    computed = {"generate", "forward", "update", "optimizer", "row_dispatch", "weight_sync"}
    assert phases >= computed | {"other", "logging", "wait_role_compute", "total"}
    assert output.count("of an iteration") == 1
    assert not phases & {"recipe", "rows", "work", "waiting", "sync"}


def test_job_writes_traces_of_selected_iterations(ranks, inputs, tmp_path):
    chosen = ["profile.iterations=[2]", "profile.ranks=1", "job.iterations=2", "job.save=false"]
    ranks.run(2, job, "grpo", inputs, tmp_path / "run", [*GRPO, *chosen])
    assert [file.name for file in (tmp_path / "run" / "profile").iterdir()] == ["iteration-000002-rank-1.json.gz"]
    with gzip.open(tmp_path / "run" / "profile" / "iteration-000002-rank-1.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names


def test_torch_profile_disk_error_warns(tmp_path, caplog):
    (tmp_path / "profile").write_text("")
    with TorchProfile(ProfileConfig(iterations=[1]), tmp_path, rank=0)(1):
        pass
    assert len(caplog.messages) == 1 and "no trace of iteration 1" in caplog.messages[0]


def test_torch_profile_exception_of_the_iteration_is_raised(tmp_path):
    with pytest.raises(KeyError), TorchProfile(ProfileConfig(iterations=[1]), tmp_path, rank=0)(1):
        raise KeyError
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ProfileConfig(ranks="0-4"), "profile.ranks=0-4: the job's ranks are 0 to 3"),
        (ProfileConfig(ranks="x"), "profile.ranks: ranks 'x'"),
        (ProfileConfig(iterations=[3, 101]), "profile.iterations: 101 is after the last one. Set 1 to 100"),
        (ProfileConfig(memory=True), "profile.memory=true: no iterations are set"),
        (ProfileConfig(memory=True, iterations=[1]), "profile.memory=true: only GPU memory"),
    ],
)
def test_check_profile_invalid_section_raises(config, words):
    with pytest.raises(UserError) as raised:
        check_profile(config, ranks=4, iterations=100)
    assert words in str(raised.value)


@pytest.fixture
def now(monkeypatch):
    """Time that moves only when a test moves it; the wall clock is 1000 seconds ahead."""
    time = [100.0]
    monkeypatch.setattr(timer_module.time, "perf_counter", lambda: time[0])
    monkeypatch.setattr(module.time, "time", lambda: time[0] + 1000)
    return time


def lines(folder, rank=0):
    return read_lines(folder / f"rank-{rank}.jsonl")


def iteration_of(now, timer, *phases):
    for phase, seconds in phases:
        with timer(phase):
            now[0] += seconds


def test_timeline_writes_a_line_per_iteration(now, tmp_path):
    timer = PhaseTimer()
    timeline = Timeline(tmp_path / "timeline", 3, timer)
    iteration_of(now, timer, ("generate", 1.25), ("sync", 0.5))
    timeline.write(timeline.line(1))
    now[0] += 0.25
    iteration_of(now, timer, ("update", 2.0))
    timeline.write(timeline.line(2))
    assert lines(tmp_path / "timeline", 3) == [
        {"iteration": 1, "start": 1100.0, "spans": [["generate", 0.0, 1.25], ["sync", 1.25, 1.75]]},
        {"iteration": 2, "start": 1101.75, "spans": [["update", 0.25, 2.25]]},
    ]


def test_timeline_resumed_run_replaces_iterations(now, tmp_path):
    timer = PhaseTimer()
    timeline = Timeline(tmp_path, 0, timer)
    for iteration in (1, 2, 3):
        iteration_of(now, timer, ("work", 1.0))
        timeline.write(timeline.line(iteration))
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"iteration": 4, "sta')
    again = Timeline(tmp_path, 0, timer, first_step=2)
    iteration_of(now, timer, ("update", 1.0))
    again.write(again.line(2))
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
        timeline.write(timeline.line(iteration))
    assert len(caplog.records) == 1 and "the timeline of this rank ends here" in caplog.text
