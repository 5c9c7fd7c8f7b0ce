"""A rank that dies, hangs or raises is named, once, and the job ends: real ranks under the real launcher."""

import signal
import time

import pytest

from tests.launched import (
    ended,
    error_lines,
    goes_on,
    iterations_done,
    rank_process,
    started,
    torchrun,
    train_command,
    watched,
    write_inputs,
)
from tests.tiny_jobs import logged
from verl_mg.distributed.stacks import main_stack, main_waits, place
from verl_mg.distributed.watchdog import EXIT_RANK_LOST, HEARTBEAT_SECONDS


@pytest.mark.nightly  # as the next one does
def test_a_stopped_rank_of_a_job_is_named_with_its_stack(tmp_path):
    inputs = write_inputs(tmp_path / "inputs")
    command = [
        *torchrun(2, "--shutdown-timeout", "1"),
        *train_command(inputs, tmp_path / "run", "job.heartbeat_timeout_s=6"),
    ]
    with started(command) as launcher:
        iterations_done(tmp_path / "run", 2, launcher)
        time.sleep(2 * HEARTBEAT_SECONDS)  # it has told where it stands in the loop
        stopped = rank_process(launcher, 1)
        stopped.send_signal(signal.SIGSTOP)
        code, _, err = ended(launcher)
    assert code == EXIT_RANK_LOST, err
    (line,) = error_lines(err)
    assert line.startswith("error: rank 1 (host ") and f"pid {stopped.pid}) has not been heard of for" in line
    assert "it was last at " in line and "\n    verl_mg/run/loop.py:" in err
    assert "Traceback" not in err


def test_restarted_ranks_go_on_where_lost_ones_were(tmp_path):
    inputs, output = write_inputs(tmp_path / "inputs"), tmp_path / "run"
    settings = ["job.heartbeat_timeout_s=5", "job.iterations=60", "checkpoint.every=1"]
    restarts = torchrun(2, "--max-restarts", "2", "--shutdown-timeout", "1")
    with started([*restarts, *train_command(inputs, output, *settings)]) as launcher:
        iterations_done(output, 2, launcher)
        rank_process(launcher, 0).kill()
        iterations_done(output, 20, launcher)
        rank_process(launcher, 1).send_signal(signal.SIGSTOP)
        code, _, err = ended(launcher)
    assert code == 0, err
    assert len(error_lines(err)) == 2 and "error: rank 1 (host " in err and "error: rank 0 (host " in err
    assert err.count("goes on after iteration") == 2
    steps = [line["step"] for line in logged(output)]
    assert steps == list(range(1, 61))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_is_named_by_those_that_it_leaves(rank):
    with started([*torchrun(3), *watched(heartbeat_timeout_s=4)]) as launcher:
        goes_on(launcher)
        killed = rank_process(launcher, rank)
        killed.kill()
        code, _, err = ended(launcher)
    assert code == 128 + signal.SIGKILL, err
    (line,) = error_lines(err)
    assert f"rank {rank} (host " in line and f"pid {killed.pid})" in line and "it was last at verl_mg/" in line
    assert "Traceback" not in err


def test_a_rank_that_hangs_is_named_with_its_function():
    with started([*torchrun(3), *watched("if rank == 1 and step == 5: hang()", stall_timeout_s=5)]) as launcher:
        code, _, err = ended(launcher)
    assert code == EXIT_RANK_LOST, err
    (line,) = error_lines(err)
    assert line.startswith("error: no rank has gone on for ") and "the others wait for rank 1 (host " in line
    assert line.endswith(" in hang") and "tests/distributed/watched.py:" in line
    assert "\nrank 1:\n" in err and "\nranks 0, 2:\n" in err
    assert "Traceback" not in err


def test_a_rank_that_works_for_long_is_no_hang():
    """Alone it would be past `stall_timeout_s`, but another one goes on."""
    code = "[world.watch.heed(lambda: time.monotonic()), time.sleep(8)] if rank == 1 and step == 3 else 0\n"
    code += "if step == 5: raise UserError('enough')"
    with started([*torchrun(2), *watched(code, heartbeat_timeout_s=4, stall_timeout_s=5)]) as launcher:
        code, _, err = ended(launcher)
    assert (code, err) == (2, "error: enough\n")


@pytest.mark.parametrize("where", ["rank == 1", "True"])
def test_what_one_rank_or_all_ranks_raise_is_told_once(where):
    with started([*torchrun(3), *watched(f"if step == 3 and {where}: raise KeyError('ouch')")]) as launcher:
        code, _, err = ended(launcher)
    assert code == 1, err
    assert err.count("Traceback") == 1 and err.count("KeyError: 'ouch'") == 1
    assert not error_lines(err)


def test_a_mistake_that_one_rank_finds_ends_those_that_sleep():
    code = "if step == 3:\n  if rank == 1: raise UserError('no ruler')\n  time.sleep(10**6)"
    with started([*torchrun(3), *watched(code)]) as launcher:
        assert ended(launcher) == (2, "goes on\n", "error: no ruler\n")


def test_where_the_main_thread_stands():
    innermost, caller, *_ = main_stack()
    assert innermost.startswith("verl_mg/distributed/stacks.py:") and innermost.endswith(" _frame")
    assert caller.endswith(" main_stack")
    assert not main_waits()
    stack = ["lib/python3.11/threading.py:9 wait", "recipes/mine.py:3 iteration", "verl_mg/run/loop.py:5 run"]
    assert place(stack) == "recipes/mine.py:3 in iteration"
    assert place([]) == "an unknown place"
