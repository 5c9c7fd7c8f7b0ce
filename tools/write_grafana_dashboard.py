"""Writes launch/grafana.json, the dashboard of runs in Grafana: `python -m tools.write_grafana_dashboard`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[1] / "launch" / "grafana.json"
WIDTH, HEIGHT = 24, 8
"""Columns of a dashboard, and rows of a panel."""
RUN = 'run=~"$run"'
"""Selects the runs that the user has chosen."""
MIN_MEAN_MAX = ("min", "mean", "max")


@dataclass(frozen=True)
class Panel:
    """Panel of the dashboard with its queries."""

    title: str
    """Title."""
    expressions: dict[str, str]
    """Queries by the text of their legend."""
    unit: str = "short"
    """Grafana's name of the unit."""
    kind: str = "timeseries"
    """Grafana's name of the kind of panel."""
    columns: int = 8
    """Width."""
    stacked: bool = False
    """Whether the curves are stacked."""


def metric(name: str) -> str:
    """Returns the query of a metric, such as `reward/mean`."""
    return f"verl_mg_{name.replace('/', '_')}{{{RUN}}}"


def family(prefix: str) -> str:
    """Returns the query of all metrics whose names begin with `prefix`, such as `time/phase/`."""
    return f'{{__name__=~"verl_mg_{prefix.replace("/", "_")}.+",{RUN}}}'


def each(*names: str) -> dict[str, str]:
    """Returns queries of metrics by their names."""
    return {f"{{{{run}}}} {name}": metric(name) for name in names}


def over_ranks(name: str) -> dict[str, str]:
    """Returns queries of a metric of ranks: its smallest, mean and largest value."""
    return each(*(f"{name}/{which}" for which in MIN_MEAN_MAX))


NAMED = "{{run}} {{__name__}}"
"""Legend of a `family`."""
ROWS: dict[str, list[Panel]] = {
    "State": [
        Panel("Iteration", {"{{run}}": metric("iteration")}, kind="stat", columns=4),
        Panel("Seconds left", {"{{run}}": metric("eta_seconds")}, "s", "stat", 4),
        Panel("Seconds without progress", {"{{run}}": metric("seconds_without_progress")}, "s", "stat", 4),
        Panel("Oldest heartbeat", {"{{run}}": f"max by (run) ({metric('heartbeat_age_seconds')})"}, "s", "stat", 4),
        Panel("State", {"{{run}} {{state}}": metric("state")}, kind="stat", columns=4),
        Panel("Phase", {"{{run}} {{phase}}": metric("phase")}, kind="stat", columns=4),
    ],
    "Learning": [
        Panel("Reward", each("reward/mean", "reward/std")),
        Panel("Evaluation", {NAMED: family("eval/")}),
        Panel("Response length in tokens", each("response/length")),
        Panel("Truncated responses", each("response/truncated"), "percentunit"),
        Panel("Entropy", each("actor/entropy")),
        Panel("Loss", each("actor/loss")),
        Panel("Norm of the gradient", each("actor/grad_norm")),
        Panel("Difference of engine and training", each("mismatch/mean_abs", "mismatch/k3")),
        Panel("Staleness in optimizer steps", each("rollout/staleness")),
    ],
    "Speed": [
        Panel("Tokens per second", each("time/tokens_per_second")),
        Panel("Seconds of an iteration", each("time/iteration"), "s"),
        Panel("Seconds per phase", {NAMED: family("time/phase/")}, "s", stacked=True),
        Panel("MFU", each("time/mfu"), "percentunit"),
        Panel("Weight sync per rank", each("time/weight_sync_gb_per_s"), "GBs"),
        Panel("Imbalance of engines", each("rollout/load_imbalance", "time/busiest_engine")),
    ],
    "Engines": [
        Panel("Requests", each("time/engine_running", "time/engine_waiting")),
        Panel("Use of the key-value cache", each("time/engine_cache_usage"), "percentunit"),
        Panel("Cache hits of prompts", each("time/prompt_cache_hits"), "percentunit"),
        Panel("Accepted drafted tokens", each("time/draft_acceptance"), "percentunit"),
        Panel("Tokens per step with drafts", each("time/draft_tokens_per_step")),
        Panel("Engines that died", each("rollout/engine_deaths")),
    ],
    "Machines": [
        Panel("GPU memory", over_ranks("time/gpu_memory_gib"), "gbytes"),
        Panel("GPU utilization", over_ranks("time/gpu_utilization"), "percentunit"),
        Panel("Host memory", over_ranks("time/host_memory_gib"), "gbytes"),
    ],
}


def dashboard() -> dict[str, Any]:
    """Returns the dashboard in Grafana's format."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(_place({"type": "row", "title": title, "collapsed": False, "panels": []}, 0, y, WIDTH, 1))
        x, y = 0, y + 1
        for panel in row:
            if x + panel.columns > WIDTH:
                x, y = 0, y + HEIGHT
            panels.append(_place(_panel(panel), x, y, panel.columns, HEIGHT))
            x += panel.columns
        y += HEIGHT
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "title": "verl_mg runs",
        "uid": "verl-mg-runs",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _place(panel: dict[str, Any], x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return panel | {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(panel: Panel) -> dict[str, Any]:
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 40} if panel.stacked else {}
    shown = {"options": {"textMode": "value_and_name"}} if panel.kind == "stat" else {}
    return shown | {
        "type": panel.kind,
        "title": panel.title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend}
            for i, (legend, expression) in enumerate(panel.expressions.items())
        ],
    }


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "run",
            "type": "query",
            "label": "Run",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": "label_values(verl_mg_iteration, run)",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
        },
    ]


def document() -> str:
    """Returns the text of launch/grafana.json."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    DASHBOARD.write_text(document(), encoding="utf-8")
    print(DASHBOARD)
