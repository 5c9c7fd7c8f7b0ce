"""The table of the time per phase."""

import contextlib
import io
import re

from tests.run.short_jobs import GRPO, job
from verl_mg.monitor.profile import INEXACT, Profile, format_table
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
    for phase in (
        "generate",
        "forward",
        "update",
        "optimizer",
        "row_dispatch",
        "weight_sync",
        "other",
        "logging",
        "wait_role_compute",
        "total",
    ):
        assert re.search(rf"^{phase} +\d+\.\d+ +\d+\.\d+ +\d+\.\d%$", output, re.M), phase
    assert output.count("of an iteration") == 1
    phases = set(re.findall(r"^(\w+) +\d+\.\d+ +\d+\.\d+ +\d+\.\d%$", output, re.M))
    assert any(phase.startswith("wait_") for phase in phases)
    assert not phases & {"recipe", "rows", "work", "waiting", "sync"}
