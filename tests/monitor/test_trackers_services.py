"""The real libraries, without a network: what they keep on disk, and that a resumed run goes on in the same one."""

import importlib.util
import json
import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.helpers import warm_start
from verl_mg.errors import UserError
from verl_mg.monitor.trackers.services import check_services

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


def test_check_services_missing_library_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="tracking.services: mlflow is not installed. Run pip install mlflow-skinny"):
        check_services(["mlflow"])


@needs("wandb")
def test_wandb_resumed_run_keeps_its_id(tmp_path: Path) -> None:
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


@pytest.mark.nightly
@needs("mlflow")
def test_mlflow_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    tracked(tmp_path, "mlflow")
    run = json.loads((tmp_path / "trackers.json").read_text())["mlflow"]
    (folder,) = (tmp_path / "mlflow").glob(f"*/{run}")
    points = [line.split()[1:] for line in (folder / "metrics" / "reward" / "mean").read_text().splitlines()]
    assert points == [["0.25", "1"], ["0.5", "2"], ["0.5", "2"], ["0.75", "3"]]
    assert (folder / "metrics" / "eval" / "pass_4").exists()
    assert (folder / "params" / "tracking.project").read_text() == "sums"


@needs("mlflow")
def test_mlflow_unreachable_server_warns_once(tmp_path: Path) -> None:
    output = tracked(tmp_path, "mlflow", MLFLOW_TRACKING_URI="http://127.0.0.1:1", MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    assert output.count("mlflow fails, training continues without it") == 2  # once in each of the two
    assert output.count("mlflow: 2 steps are missing there") == 2
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.nightly
@needs("swanlab")
def test_swanlab_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    tracked(tmp_path, "swanlab")
    identity = json.loads((tmp_path / "trackers.json").read_text())["swanlab"]
    written = sorted((tmp_path / "swanlab").glob(f"run-*-{identity}/run-{identity}.swanlab"))
    assert len(written) == 2
    assert all(b"reward/mean" in file.read_bytes() for file in written)
    rows = [
        json.loads(file.read_text())["rowData"] for file in (tmp_path / "swanlab").glob("run-*/media/echarts/*.json")
    ]
    assert [row["response"] for row in rows[0]] == ['so "3"\n', "9"] and len(rows) == 4
