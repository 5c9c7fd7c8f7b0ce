"""Services and their libraries: Weights & Biases, MLflow, SwanLab.

Each asks the environment where it writes to, as its own documentation says (WANDB_MODE, MLFLOW_TRACKING_URI,
SWANLAB_MODE, ...). A run keeps the id that a service knows it by in trackers.json, so that it goes on in the same run
there after a kill. A step may then be there twice: a service takes nothing back, and the second value is the same.
"""

from __future__ import annotations

import importlib.util
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
from verl_mg.monitor.trackers.tracker import Tracker

IDS = "trackers.json"
PARAMS_AT_ONCE = 100
"""What a server of MLflow takes in one request."""


@dataclass(frozen=True)
class RunInfo:
    """What a service is told of a run. folder: where the run goes; tree: its whole configuration."""

    folder: Path
    project: str
    name: str
    tree: dict[str, Any]

    def known_id(self, service: str) -> str | None:
        """By which the service knows this run, if it does."""
        file = self.folder / IDS
        return json.loads(file.read_text(encoding="utf-8")).get(service) if file.exists() else None

    def keep_id(self, service: str, identity: str) -> str:
        """Write it down for when the run goes on; returns it."""
        file = self.folder / IDS
        ids = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        partial = file.with_name(file.name + ".new")
        partial.write_text(json.dumps(ids | {service: identity}) + "\n", encoding="utf-8")
        os.replace(partial, file)
        return identity


class WandbTracker:
    """Weights & Biases; with WANDB_MODE=offline, files in RUN/wandb for `wandb sync`."""

    def __init__(self, run: RunInfo) -> None:
        import wandb

        identity = run.known_id("wandb") or run.keep_id("wandb", secrets.token_hex(4))
        settings = wandb.Settings(console="off")  # the bar draws over itself: nothing to keep
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.folder),
            config=run.tree,
            id=identity,
            resume="allow",
            settings=settings,
        )
        # An axis of our own: W&B's one would refuse the steps that a resumed run does again.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics | {"step": step})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """MLflow at MLFLOW_TRACKING_URI, or in RUN/mlflow."""

    def __init__(self, run: RunInfo) -> None:
        # Of a server that does not answer: its own defaults wait for minutes, and a step with them.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        folder = (run.folder / "mlflow").absolute().as_uri()
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", folder))
        if (known := run.known_id("mlflow")) is not None:
            self._run = known
            self._client.update_run(known, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        self._run = run.keep_id("mlflow", self._client.create_run(experiment, run_name=run.name).info.run_id)
        params = [Param(*pair) for pair in _flat(run.tree)]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._run, params=params[start : start + PARAMS_AT_ONCE])

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        told = [self._metric(_plain(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run, metrics=told)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class SwanlabTracker:
    """SwanLab; with SWANLAB_MODE=offline, files in RUN/swanlab for `swanlab sync`."""

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

    def close(self) -> None:
        self._run.finish()


SERVICES: dict[str, tuple[str, Callable[[RunInfo], Tracker]]] = {
    "wandb": ("wandb", WandbTracker),
    "mlflow": ("mlflow-skinny", MlflowTracker),
    "swanlab": ("swanlab", SwanlabTracker),
}
"""By the name in tracking.services, which is that of the module too: what pip calls it, and the tracker."""


def check_services(names: Sequence[str]) -> None:
    """UserError for one whose library is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"tracking.services: {name} is not installed. Run pip install {SERVICES[name][0]}.")


def _flat(tree: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    """(key, value) of all leaves, a.b.c, cut to what MLflow takes."""
    pairs = []
    for key, value in tree.items():
        below = isinstance(value, dict) and value
        pairs += _flat(value, f"{before}{key}.") if below else [(_plain(before + str(key)), str(value)[:500])]
    return pairs


def _plain(name: str) -> str:
    """MLflow takes no other characters in a name: pass@4 is pass_4 there."""
    return re.sub(r"[^\w\-. /]", "_", name)
