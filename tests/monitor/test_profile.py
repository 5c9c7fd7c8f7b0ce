"""The table of where an iteration's time went."""

import contextlib
import io
import re

from tests.run.test_loop import GRPO, inputs, job  # noqa: F401, a fixture
from verl_mg.monitor.profile import INEXACT, Profile, format_table
from verl_mg.phase_timer import PhaseTimer


def test_the_table_of_two_ranks():
    first = {"generate": 6.0, "update": 2.0, "row_dispatch": 1.0}
    second = {"generate": 4.0, "update": 2.0, "wait_role_compute": 2.0, "row_dispatch": 3.0}
    assert format_table([first, second]).splitlines() == [
        "phase                 mean s    most s    share",
        "generate               5.000     6.000    50.0%",
        "row_dispatch           2.000     3.000    20.0%",
        "update                 2.000     2.000    20.0%",
        "wait_role_compute      1.000     2.000    10.0%",
        "around generate, forward, update, optimizer, and waiting for ranks that do these: 2.000 of 10.000 s, "
        "20.0% of an iteration",
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


def test_without_an_iteration_there_is_no_table(ranks):
    assert ranks.run(2, nothing_done) == ["", ""]


def test_the_first_iteration_is_left_out(ranks):
    for table in ranks.run(2, means_over_iterations):
        assert re.search(r"^update +2\.000 +2\.000 +80\.0%$", table, re.M)
        assert "0.500 of 2.500 s, 20.0% of an iteration" in table


def told_by(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as told:
        job(*arguments)
    return told.getvalue()


def test_a_run_tells_where_its_time_went(ranks, inputs, tmp_path):  # noqa: F811
    placement = ["reference.ranks=1", "actor.ranks=0", "profile.synchronize=true"]
    told, silent = ranks.run(2, told_by, "grpo", inputs, tmp_path / "run", [*GRPO, *placement])
    assert "phase" not in silent
    for phase in (
        "generate",
        "forward",
        "update",
        "optimizer",
        "wait_role_compute",
        "row_dispatch",
        "weight_sync",
        "other",
        "logging",
    ):
        assert re.search(rf"^{phase} +\d+\.\d+ +\d+\.\d+ +\d+\.\d%$", told, re.M), phase
    assert told.count("of an iteration") == 1
