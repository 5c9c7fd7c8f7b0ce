"""Trackers of metrics: files, folders and services."""

import importlib.util
import io
import json
import logging
import math
import os
import resource
import subprocess
import textwrap
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.helpers import warm_start
from tests.helpers.json_lines import read_lines
from tests.run.jobs import job, make_inputs
from verl_mg.config import Config
from verl_mg.errors import UserError
from verl_mg.monitor.status import EtaEstimator
from verl_mg.monitor.trackers import build_trackers
from verl_mg.monitor.trackers.console import ConsoleTracker
from verl_mg.monitor.trackers.files import EvaluationTable, JsonlTracker, TensorBoardTracker, plot_reward_curve
from verl_mg.monitor.trackers.services import check_services
from verl_mg.monitor.trackers.tracker import RetryingTracker, Tracker
from verl_mg.phase_timer import PhaseTimer


def test_jsonl_tracker_floats_are_bitwise_identical(tmp_path):
    values = np.random.default_rng(0).standard_normal(100) * 1e-5
    tracker: Tracker = JsonlTracker(tmp_path / "new" / "metrics.jsonl")
    tracker.log(1, {str(i): value for i, value in enumerate(values)})
    lines = read_lines(tmp_path / "new" / "metrics.jsonl")  # before it is closed
    tracker.close()
    assert lines == [{"step": 1} | {str(i): float(value) for i, value in enumerate(values)}]


def test_jsonl_tracker_non_finite_values_are_null(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {"a": math.nan, "b": -math.inf, "c": np.float32(0.1)})
    tracker.close()
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "a": None, "b": None, "c": float(np.float32(0.1))}]


@pytest.mark.parametrize(("first_step", "steps"), [(3, [1, 2, 3]), (None, [1, 2, 3, 4, 3])])
def test_jsonl_tracker_resumed_file_has_no_repeated_lines(tmp_path, first_step, steps):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {i}}}\n' for i in range(1, 5)) + '{"step": 5, "lo')
    tracker = JsonlTracker(path, first_step)
    tracker.log(3, {})
    tracker.close()
    assert [line["step"] for line in read_lines(path)] == steps
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


EVALUATION = {"eval/reward": 0.5, "eval/pass@4": 0.75, "reward/mean": 1.0}


def test_evaluation_table_resumed_run_keeps_the_columns(tmp_path):
    path = tmp_path / "evaluation.md"
    table = EvaluationTable(path)
    for step in (0, 2, 4):
        table.log(step, EVALUATION)
        table.log(step + 1, {"reward/mean": 1.0})
    resumed = EvaluationTable(path, first_step=4)
    resumed.log(4, {"eval/pass@4": 1.0, "eval/reward": 0.25})
    assert path.read_text().splitlines() == [
        "| iteration | reward | pass@4 |",
        "| ---: | ---: | ---: |",
        "| 0 | 0.5000 | 0.7500 |",
        "| 2 | 0.5000 | 0.7500 |",
        "| 4 | 0.2500 | 1.0000 |",
    ]
    EvaluationTable(path).log(0, EVALUATION)
    assert len(path.read_text().splitlines()) == 3


def test_tensorboard_tracker_resumed_run_replaces_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker: Tracker = TensorBoardTracker(tmp_path)
    for step, value in ((1, 0.25), (2, 0.5), (3, 0.75)):
        tracker.log(step, {"reward/mean": value})
    tracker.close()
    tracker = TensorBoardTracker(tmp_path, first_step=3)
    tracker.log(3, {"reward/mean": 1.0})
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 1.0)]


def test_retrying_tracker_warns_once_and_logs_missed_steps(tmp_path, caplog):
    folder = tmp_path / "missing"
    tracker = RetryingTracker("the table", lambda: EvaluationTable(folder / "evaluation.md"), retry_after=0.0)
    tracker.log(0, EVALUATION)
    tracker.log(1, EVALUATION)
    folder.mkdir()
    tracker.log(2, EVALUATION)
    tracker.close()
    assert len((folder / "evaluation.md").read_text().splitlines()) == 2 + 3
    (warning,) = caplog.messages
    assert warning.startswith("the table fails, training continues without it: FileNotFoundError")


def test_retrying_tracker_that_cannot_be_opened_warns(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    tracker = RetryingTracker("TensorBoard", lambda: TensorBoardTracker(tmp_path / "file" / "folder"))
    for step in range(3):
        tracker.log(step, {"a": 1.0})
    tracker.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert caplog.messages[1] == "TensorBoard: 3 steps are missing there"


def test_retrying_tracker_full_disk_line_is_written_once_later(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    tracker = RetryingTracker("metrics.jsonl", lambda: JsonlTracker(path), retry_after=0.0)
    tracker.log(1, {"a": 1.0})
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard_limit))
    try:
        tracker.log(2, {"a": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))
    assert [line["step"] for line in read_lines(path)] == [1]
    tracker.log(3, {"a": 3.0})
    tracker.close()
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]
    assert len(caplog.messages) == 1


def shown(terminal: bool, timer: PhaseTimer | None = None) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=160)
    tracker: Tracker = ConsoleTracker(20, "grpo [x]", first_step=11, console=console, timer=timer)
    tracker.log(11, {"reward/mean": 0.12345, "reward/max": 7.5, "eval/reward": 0.5, "time/tokens_per_second": 34567.8})
    tracker.log(12, {})
    tracker.close()
    return screen.getvalue()


def test_console_tracker_without_terminal_prints_lines():
    first, second = shown(terminal=False).splitlines()
    assert first.startswith("step 11/20  reward 0.1235  eval 0.5  tokens/s 34568  elapsed 0:00:0")
    assert second.startswith("step 12/20  elapsed") and "eta 0:00:0" in second
    assert "\x1b" not in first + second


@pytest.mark.parametrize("wanted", [True, False])
def test_build_trackers_prints_where_a_console_is_wanted(tmp_path, capsys, wanted):
    job = {"output": tmp_path, "console": wanted}
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "job": job})
    for tracker in build_trackers("grpo", config, PhaseTimer()):
        tracker.log(1, {"reward/mean": 0.25})
        tracker.close()
    assert ("reward 0.25" in capsys.readouterr().out) == wanted


def test_console_tracker_on_a_terminal_draws_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    timer = PhaseTimer()
    with timer("other"), timer("generate"):
        text = shown(terminal=True, timer=timer)
    assert "\x1b" in text and "12/20" in text and "reward 0.1235  eval 0.5" in text
    assert "generate" in text and "other" not in text
    assert "eta 0:00:00" in text


def test_eta_uses_the_median_of_the_latest_iterations(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("verl_mg.monitor.status.time.monotonic", lambda: now[0])
    eta = EtaEstimator(total=20, done=4)
    assert eta.seconds_left is None
    for done, seconds in ((5, 500.0), (6, 40.0), (8, 80.0)):  # the first one compiles
        now[0] += seconds
        eta.update(done)
    assert eta.seconds_left == 12 * 40.0
    now[0] += 30.0
    assert eta.seconds_left == 12 * 40.0 - 30.0
    now[0] += 9999.0
    assert eta.seconds_left == 0.0


def test_plot_reward_curve_writes_an_image(tmp_path):
    from matplotlib.image import imread

    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in range(1, 30):
        tracker.log(step, {"reward/mean": math.nan if step == 3 else step / 30})
    tracker.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "rew')
    path = plot_reward_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    assert path == tmp_path / "curve.png"
    picture = imread(path)
    assert picture.shape[:2] == (675, 1200)
    assert picture[..., :3].min() < 0.5 < picture[..., :3].mean()  # ink on a light ground


def test_plot_reward_curve_without_series_writes_nothing(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "reward/mean": null}\n')
    assert plot_reward_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png") is None
    assert not (tmp_path / "curve.png").exists()


ROOT = Path(__file__).parents[2]
ALONE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "SWANLAB_MODE": "offline",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")


def tracked(folder: Path, service: str, **environment: str) -> str:
    """Steps 1 and 2, and 2 and 3 of the run that goes on, in a process of its own; what that said, and its threads."""
    program = f"""
        import threading
        import time
        from pathlib import Path
        from verl_mg.phase_timer import PhaseTimer
        from verl_mg.config import Config
        from verl_mg.monitor.trackers.tracker import SampleTable
        from verl_mg.monitor.trackers import build_trackers

        table = SampleTable(("prompt", "response", "reward"), [["1+2=", 'so "3"\\n', 1.0], ["4+4=", "9", None]])
        config = Config.model_validate({{
            "model": {{"path": "m"}},
            "data": {{"train": "d"}},
            "job": {{"output": {str(folder)!r}, "console": False}},
            "tracking": {{"services": [{service!r}], "project": "sums", "name": "first try"}},
        }})
        for first in (1, 2):
            if first > 1:
                time.sleep(1.0)  # the libraries name a folder after the second of its start
            trackers = build_trackers("grpo", config, PhaseTimer(), first if first > 1 else 0)
            for step in range(first, first + 2):
                for tracker in trackers:
                    tracker.log(step, {{"reward/mean": step / 4, "eval/pass@4": 0.5}}, table)
            for tracker in trackers:
                tracker.close()
        print("left:", [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()])
    """
    output = subprocess.run(
        [warm_start.shared().python, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env=os.environ | ALONE | environment,
    )
    assert output.returncode == 0, output.stderr
    assert "left: []" in output.stdout
    return output.stdout + output.stderr


@pytest.mark.parametrize("found", [None, ModuleSpec("mlflow", None)], ids=["nothing", "folder of its runs"])
def test_check_services_missing_library_raises(monkeypatch, found):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(UserError, match="tracking.services: mlflow is not installed. Run pip install mlflow-skinny"):
        check_services(["mlflow"])


@needs("wandb")
def test_wandb_resumed_run_keeps_its_id(tmp_path):
    tracked(tmp_path, "wandb")
    identity = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    written = sorted((tmp_path / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))
    assert len(written) == 2
    for file in written:
        content = file.read_bytes()
        assert b"reward/mean" in content and b"first try" in content and b"heartbeat_timeout_s" in content
    tables = list((tmp_path / "wandb").glob("offline-run-*/files/media/table/samples_*.table.json"))
    assert len(tables) == 4  # of two steps in each of the two
    for table in tables:
        written_table = json.loads(table.read_text())
        assert written_table["columns"] == ["prompt", "response", "reward"]
        assert written_table["data"] == [["1+2=", 'so "3"\n', 1.0], ["4+4=", "9", None]]


def tracked_job(inputs: Path, output: Path) -> None:
    tracking = {"services": ["wandb"], "project": "sums", "name": "first try", "samples": 2}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ALONE.items():
            patch.setenv(name, value)
        job("grpo", inputs, output, [f"tracking={json.dumps(tracking)}"])


@pytest.mark.nightly
@needs("wandb")
def test_job_sends_each_service_as_many_samples_as_configured(ranks, tmp_path):
    ranks.run(1, tracked_job, make_inputs(tmp_path / "inputs"), tmp_path / "run")
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"first try" in file.read_bytes()
    tables = [json.loads(table.read_text()) for table in file.parent.glob("files/media/table/samples_*.table.json")]
    assert [len(table["data"]) for table in tables] == [2, 2, 2]


@pytest.mark.nightly
@needs("mlflow")
def test_mlflow_resumed_run_keeps_its_id(tmp_path):
    tracked(tmp_path, "mlflow")
    run = json.loads((tmp_path / "trackers.json").read_text())["mlflow"]
    (folder,) = (tmp_path / "mlflow").glob(f"*/{run}")
    points = [line.split()[1:] for line in (folder / "metrics" / "reward" / "mean").read_text().splitlines()]
    assert points == [["0.25", "1"], ["0.5", "2"], ["0.5", "2"], ["0.75", "3"]]
    assert (folder / "metrics" / "eval" / "pass_4").exists()
    assert (folder / "params" / "tracking.project").read_text() == "sums"
    assert "\nname: sums\n" in (folder.parent / "meta.yaml").read_text()


@needs("mlflow")
def test_mlflow_unreachable_server_warns_once(tmp_path):
    output = tracked(tmp_path, "mlflow", MLFLOW_TRACKING_URI="http://127.0.0.1:1", MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    assert output.count("mlflow fails, training continues without it") == 2  # once in each of the two
    assert output.count("mlflow: 2 steps are missing there") == 2
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.nightly
@needs("swanlab")
def test_swanlab_resumed_run_keeps_its_id(tmp_path):
    tracked(tmp_path, "swanlab")
    identity = json.loads((tmp_path / "trackers.json").read_text())["swanlab"]
    written = sorted((tmp_path / "swanlab").glob(f"run-*-{identity}/run-{identity}.swanlab"))
    assert len(written) == 2
    assert all(b"reward/mean" in file.read_bytes() for file in written)
    rows = [
        json.loads(file.read_text())["rowData"] for file in (tmp_path / "swanlab").glob("run-*/media/echarts/*.json")
    ]
    assert [row["response"] for row in rows[0]] == ['so "3"\n', "9"] and len(rows) == 4
