"""Ranks that the launcher starts again: real ranks under the real launcher, killed from outside."""

import re
import signal

import pytest

from tests.helpers.launched import (
    HELD,
    alive,
    descendants,
    error_lines,
    finished,
    hold,
    started,
    torchrun,
    train_command,
    watched,
    write_inputs,
)
from tests.helpers.tiny_jobs import logged, metrics_of
from verl_mg.launch.agent import MAX_SAME_FAILURES, RestartPolicy

RESTARTS = ("--max-restarts", "3")


def test_lost_rank_is_replaced_and_a_stop_request_ends_the_job():
    with started([*torchrun(2, *RESTARTS), *watched()]) as launcher:
        launcher.wait_for_steps()
        first = [launcher.rank(rank) for rank in range(2)]
        first[1].kill()
        launcher.wait_for_steps()
        assert not alive(first, 0)
        launcher.send_signal(signal.SIGTERM)
        code, out, err = launcher.ended()
    assert (code, out) == (128 + signal.SIGTERM, "")
    (line,) = [line for line in err.splitlines() if line.startswith("launcher: ")]
    assert re.fullmatch(
        rf"launcher: rank 1 \(host .*, pid {first[1].pid}\) was ended by SIGKILL after iteration 0; all ranks start "
        r"again in 0 s, 2 restarts are left",
        line,
    )


@pytest.mark.parametrize(
    ("code_of_ranks", "starts", "code"),
    [
        # A rank, which is forked no further, may ask CUDA itself.
        ("if step == 3: raise UserError(os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK', 'wrong'))", 1, 2),
        pytest.param("if step == 3: raise ValueError('broken')", 3, 1, marks=pytest.mark.nightly),
    ],
)
def test_failure_that_comes_again_ends_the_job(code_of_ranks, starts, code):
    found, out, err = finished([*torchrun(2, *RESTARTS), *watched(code_of_ranks)])
    assert found == code and out.count("steps done") == starts, err
    assert ("error: wrong" in err) == (code == 2)
    assert len(error_lines(err)) == (code == 2) and err.count("ValueError: broken") == (starts if code == 1 else 0)


def test_killed_launcher_leaves_no_process():
    with started([*torchrun(2, *RESTARTS), *watched(heartbeat_timeout_s=3)]) as launcher:
        launcher.wait_for_steps()
        processes = descendants(launcher.pid)
        assert {"rank 0", "rank 1"} <= {process.name() for process in processes}
        launcher.kill()
        assert alive(processes) == []


def test_job_with_a_lost_rank_goes_on_bitwise_identical(tmp_path):
    inputs = write_inputs(tmp_path / "inputs")
    settings = ["checkpoint.every=2", "job.iterations=9", "actor.layout=tp2"]
    whole, killed = (train_command(inputs, tmp_path / name, *settings, recipe=HELD) for name in ("whole", "killed"))
    hold(tmp_path / "killed", 6)
    with started([*torchrun(2, *RESTARTS), *killed]) as launcher:
        launcher.iterations_done(tmp_path / "killed", 5)
        launcher.rank(0).kill()
        hold(tmp_path / "killed", None)
        code, _, err = launcher.ended()
    assert code == 0 and "rank 0" in err, err
    finished([*torchrun(2), *whole]).completed()
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "whole")
    assert len(metrics_of(tmp_path / "whole")) == 9


@pytest.mark.nightly
def test_job_with_a_killed_and_a_stopped_rank_has_every_iteration_once(tmp_path):
    inputs, output = write_inputs(tmp_path / "inputs"), tmp_path / "run"
    settings = ["job.heartbeat_timeout_s=5", "job.iterations=12", "checkpoint.every=1"]
    restarts = torchrun(2, *RESTARTS, "--shutdown-timeout", "1")
    hold(output, 5)
    with started([*restarts, *train_command(inputs, output, *settings, recipe=HELD)]) as launcher:
        launcher.iterations_done(output, 4)
        launcher.rank(0).kill()
        hold(output, 9)
        launcher.iterations_done(output, 8)
        launcher.rank(1).send_signal(signal.SIGSTOP)
        hold(output, None)
        err = launcher.ended().completed().err
    (line,) = error_lines(err)  # of the watchdog; the launcher sees a killed rank itself
    assert line.startswith("error: rank 1 (host ") and "no heartbeat for" in line
    assert err.count("all ranks start again") == err.count("run: resumes after iteration") == 2
    assert [line["step"] for line in logged(output)] == list(range(1, 13))


KILLED, LOST, INVALID = -9, 3, 2


@pytest.mark.parametrize(
    ("losses", "pauses"),
    [
        ([(KILLED, iteration) for iteration in range(8)], [0.0] * 8),  # with progress
        ([(LOST, 5)] * MAX_SAME_FAILURES, [0.0, 1.0, None]),
        ([(LOST, 5), (LOST, 5), (KILLED, 5)], [0.0, 1.0, 0.0]),
        ([(INVALID, 1)], [None]),
    ],
)
def test_pause_of_equal_losses_without_progress_grows_until_the_job_ends(losses, pauses):
    policy = RestartPolicy()
    assert [policy.pause(*loss) for loss in losses] == pauses
