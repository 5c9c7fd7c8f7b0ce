"""Trackers for services: Weights & Biases, MLflow, SwanLab.

Each reads its destination from environment variables, as its documentation describes (WANDB_MODE, MLFLOW_TRACKING_URI,
SWANLAB_MODE, ...). The id of a run in a service is kept in trackers.json, so that a resumed run continues there. A step
can then occur twice, since services remove nothing; the second value is the same.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_mg.errors import UserError
from verl_mg.jsonl import replacing
from verl_mg.library import is_installed
from verl_mg.monitor.trackers.tracker import SampleTable, Tracker

IDS = "trackers.json"
MAX_PARAMS_PER_REQUEST = 100  # limit of an MLflow server


@dataclass(frozen=True)
class RunInfo:
    """Description of a run for a service; `tree` is the complete configuration, `folder` the output folder."""

    folder: Path
    project: str
    name: str
    tree: dict[str, Any]

    def known_id(self, service: str) -> str | None:
        """Returns the id of this run in a service; None where it has none yet."""
        file = self.folder / IDS
        return json.loads(file.read_text(encoding="utf-8")).get(service) if file.exists() else None

    def keep_id(self, service: str, identity: str) -> str:
        """Saves the id of this run in a service for a resumed run, and returns it."""
        file = self.folder / IDS
        ids = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        with replacing(file) as new:
            new.write_text(json.dumps(ids | {service: identity}) + "\n", encoding="utf-8")
        return identity


class WandbTracker:
    """Logs to Weights & Biases; with WANDB_MODE=offline, to files in RUN/wandb for `wandb sync`."""

    def __init__(self, run: RunInfo) -> None:
        import wandb

        identity = run.known_id("wandb") or run.keep_id("wandb", secrets.token_hex(4))
        settings = wandb.Settings(console="off")  # the progress bar redraws itself, and is not worth keeping
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.folder),
            config=run.tree,
            id=identity,
            resume="allow",
            settings=settings,
        )
        # A custom axis: W&B's default one would reject the repeated steps of a resumed run.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics | {"step": step})

    def log_samples(self, step: int, table: SampleTable) -> None:
        import wandb

        self._run.log({"samples": wandb.Table(columns=list(table.columns), data=table.rows), "step": step})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """Logs to MLflow at MLFLOW_TRACKING_URI, or in RUN/mlflow."""

    def __init__(self, run: RunInfo) -> None:
        # For a server that does not respond: the defaults would block a step for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions refuse a folder without it
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        folder = (run.folder / "mlflow").absolute().as_uri()
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", folder))
        if (known := run.known_id("mlflow")) is not None:
            self._run = known
            self._client.update_run(known, status="RUNNING")
            return
        existing = self._client.get_experiment_by_name(run.project)
        experiment = existing.experiment_id if existing else self._client.create_experiment(run.project)
        self._run = run.keep_id("mlflow", self._client.create_run(experiment, run_name=run.name).info.run_id)
        params = [Param(*pair) for pair in _flat(run.tree)]
        for start in range(0, len(params), MAX_PARAMS_PER_REQUEST):
            self._client.log_batch(self._run, params=params[start : start + MAX_PARAMS_PER_REQUEST])

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        values = [self._metric(_plain(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run, metrics=values)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class SwanlabTracker:
    """Logs to SwanLab; with SWANLAB_MODE=offline, to files in RUN/swanlab for `swanlab sync`."""

    def __init__(self, run: RunInfo) -> None:
        import swanlab

        identity = run.known_id("swanlab") or run.keep_id("swanlab", secrets.token_hex(4))
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            log_dir=str(run.folder / "swanlab"),
            config=run.tree,
            id=identity,
            resume="allow",
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def log_samples(self, step: int, table: SampleTable) -> None:
        from swanlab import echarts

        self._run.log({"samples": echarts.Table().add(list(table.columns), table.rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


SERVICES: dict[str, tuple[str, Callable[[RunInfo], Tracker]]] = {
    "wandb": ("wandb", WandbTracker),
    "mlflow": ("mlflow-skinny", MlflowTracker),
    "swanlab": ("swanlab", SwanlabTracker),
}
"""Name in the configuration, which is also that of the module -> name for pip, and the tracker."""


def check_services(names: Sequence[str]) -> None:
    """Checks that the libraries of services are installed; UserError otherwise."""
    for name in names:
        if not is_installed(name):  # `wandb` is also the folder of its runs
            raise UserError(f"tracking.services: {name} is not installed. Run pip install {SERVICES[name][0]}.")


def _flat(tree: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Returns (key, value) of all leaves, with keys a.b.c; values have at most the length that MLflow permits."""
    pairs = []
    for key, value in tree.items():
        below = isinstance(value, dict) and value
        pairs += _flat(value, f"{before}{key}.") if below else [(_plain(before + str(key)), str(value)[:500])]
    return pairs


def _plain(name: str) -> str:
    """Replaces characters that MLflow does not accept in a name: pass@4 becomes pass_4."""
    return re.sub(r"[^\w\-. /]", "_", name)
