"""status.json and the command that reads it."""

import json
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import warm_start
from verl_mg.errors import UserError
from verl_mg.monitor.status import Status, StatusFile, format_status, read_status, show_status, summary
from verl_mg.phase_timer import PhaseTimer

ROOT = Path(__file__).parents[2]


def status_file(folder: Path, rank: int = 0) -> StatusFile:
    return StatusFile(folder, "grpo", iterations=4, rank=rank, ranks=2)


def test_status_file_records_a_run_from_start_to_end(tmp_path):
    with status_file(tmp_path) as status:
        assert read_status(tmp_path).state == "starting"
        saved = [1]
        status.running(PhaseTimer(), iteration=1, checkpoint=lambda: saved[-1])
        now = read_status(tmp_path)
        assert (now.state, now.iteration, now.checkpoint, now.eta_seconds) == ("running", 1, 1, None)
        status.log(2, {"time/tokens_per_second": 1234.5})
        saved.append(2)
        status.log(3, {})
        now = read_status(tmp_path)
        assert (now.iteration, now.iterations, now.tokens_per_second, now.checkpoint) == (3, 4, 1234.5, 2)
        assert now.eta_seconds is not None and now.eta_seconds >= 0
    done = read_status(tmp_path)
    assert (done.state, done.recipe, done.ranks, done.eta_seconds) == ("finished", "grpo", 2, None)
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


def test_status_file_contains_the_current_phase(tmp_path):
    timer = PhaseTimer()
    with status_file(tmp_path) as status:
        status.running(timer)
        with timer("generate"):
            deadline = time.monotonic() + 600
            while read_status(tmp_path).phase != "generate":
                assert time.monotonic() < deadline
                time.sleep(0.05)
    assert read_status(tmp_path).phase == ""


def test_status_file_other_ranks_write_nothing(tmp_path):
    with status_file(tmp_path, rank=1) as status:
        status.running(PhaseTimer())
        status.log(1, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "message"), [(UserError("no such ruler"), "no such ruler"), (KeyError("a"), "KeyError: 'a'")]
)
def test_status_file_exception_is_recorded_and_raised(tmp_path, error, message):
    with pytest.raises(type(error)), status_file(tmp_path):
        raise error
    assert (read_status(tmp_path).state, read_status(tmp_path).message) == ("failed", message)


def test_status_file_run_that_left_has_not_finished(tmp_path):
    with status_file(tmp_path) as status:
        status.running(PhaseTimer())
        status.left("SIGTERM")
    assert (read_status(tmp_path).state, read_status(tmp_path).message) == ("left", "SIGTERM")
    assert show_status(tmp_path) == 3


def test_status_file_of_a_killed_run_is_complete(tmp_path):
    program = f"""
        from pathlib import Path
        from types import SimpleNamespace
        from verl_mg.monitor.status import StatusFile

        with StatusFile(Path({str(tmp_path)!r}), "grpo", 10**9, 0, 1) as status:
            status.running(SimpleNamespace(phase="generate"))
            print("running", flush=True)
            for step in range(10**9):
                status.log(step, {{}})
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    status = read_status(tmp_path)
    assert (status.state, status.pid) == ("running", process.pid)


OF_RANK_0 = {"started": 0.0, "updated": 1000.0, "host": "node7", "pid": 42, "ranks": 8}
LATEST = {"tokens_per_second": 12345.6, "eta_seconds": 3723.0, "checkpoint": 10}
RUNNING = Status("grpo", "running", iteration=12, iterations=100, phase="generate", **OF_RANK_0, **LATEST)


def test_format_status_running():
    metrics = {"step": 12, "reward/mean": 0.25, "actor/loss": None, "critic/loss": 1.5, "time/weight_sync": 3.0}
    assert format_status(RUNNING, metrics, now=1003.0).splitlines() == [
        "grpo: running",
        "iteration 12 of 100, generate, on 8 ranks",
        "12346 tokens/s, 1:02:03 left",
        "reward/mean 0.25, critic/loss 1.5",
        "checkpoint of iteration 10, updated 0:00:03 ago (node7, pid 42)",
    ]


def test_format_status_silent_run():
    assert format_status(RUNNING, {}, now=1121.0).splitlines()[:2] == [
        "grpo: no update for 0:02:01",
        "iteration 12 of 100, on 8 ranks",
    ]
    finished = replace(RUNNING, state="finished", phase="", eta_seconds=None, checkpoint=None)
    assert format_status(finished, {}, now=9999.0).startswith("grpo: finished\n")
    assert "no checkpoint" in format_status(finished, {}, now=9999.0)


def command(folder: Path) -> subprocess.CompletedProcess[str]:
    program = [warm_start.shared().python, "-m", "verl_mg", "status", str(folder)]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_status_command_returns_an_exit_code(tmp_path):
    with status_file(tmp_path) as status:
        status.running(PhaseTimer())
        status.log(1, {})
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rewa')
        running = command(tmp_path)
    assert (running.returncode, running.stderr) == (3, "")
    assert "grpo: running\niteration 1 of 4" in running.stdout and "reward/mean 0.5" in running.stdout
    assert command(tmp_path).returncode == 0


def test_read_status_without_run_raises(tmp_path):
    missing = command(tmp_path)
    assert missing.returncode == 2
    assert missing.stderr == f"error: {tmp_path}: status.json is missing. Give the job.output of a run.\n"
    (tmp_path / "status.json").write_text(json.dumps({"recipe": "grpo"}))
    with pytest.raises(UserError, match="not the status of a run"):
        read_status(tmp_path)


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
