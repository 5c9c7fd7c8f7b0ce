"""Endpoint for Prometheus on rank 0: the latest metrics and the live state of a run.

    rank's thread        log: replaces `_latest`
    thread "prometheus"  accepts connections, until `__exit__` shuts the server down
    thread per request   text: reads `_latest`, the status and the heartbeats as they are now

RUN/prometheus.json names the address for Prometheus: `file_sd_configs: [{files: [runs/mine/prometheus.json]}]`.

The text format is written here: the package prometheus_client would add a registry of the whole process, which does not
know metrics whose names come with the run.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from verl_mg.config import Config
from verl_mg.distributed.world import World
from verl_mg.errors import UserError
from verl_mg.jsonl import replacing
from verl_mg.monitor.status import StatusFile
from verl_mg.monitor.trackers import run_name

TARGETS = "prometheus.json"  # file in the run folder with the address of the endpoint
PATH = "/metrics"  # path of the metrics, Prometheus's default
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Type of the text format, see https://prometheus.io/docs/instrumenting/exposition_formats/."""
PREFIX = "verl_mg_"  # prefix of the names of all metrics
ANY_ADDRESS = ("0.0.0.0", "::")
"""Addresses that listen on all interfaces; other machines reach them by the name of the host."""


@dataclass(frozen=True)
class Gauge:
    """A metric with its values by label values."""

    name: str  # name, as `metric_name` returns it
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)  # labels in addition to the labels that all metrics have


def metric_name(name: str) -> str:
    """Returns the name of a metric in Prometheus: `verl_mg_eval_pass_4` for `eval/pass@4`."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def exposition(gauges: Iterable[Gauge], common: Mapping[str, str]) -> str:
    """Formats metrics in Prometheus's text format, with the labels `common` for all.

    exposition([Gauge("verl_mg_ranks", "number of ranks", 8)], {"run": "a"})
    # HELP verl_mg_ranks number of ranks
    # TYPE verl_mg_ranks gauge
    verl_mg_ranks{run="a"} 8.0
    """
    # Two metrics may get the same name; a family may have each label set only once, so the last value counts.
    families: dict[str, dict[str, Gauge]] = {}
    for gauge in gauges:
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in {**common, **gauge.labels}.items())
        families.setdefault(gauge.name, {})[labels] = gauge
    lines = []
    for name, family in families.items():
        text = next(iter(family.values())).help.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        # `repr` writes all digits, and nan, inf and -inf as Prometheus reads them too.
        lines += [f"{name}{{{labels}}} {float(gauge.value)!r}" for labels, gauge in family.items()]
    return "".join(f"{line}\n" for line in lines)


class PrometheusEndpoint:
    """Context manager that serves the endpoint from a thread of rank 0, if the configuration has a port."""

    # It is a tracker too: the metrics of the latest iterations are served, each with its last value.

    def __init__(self, config: Config, recipe: str, status: StatusFile, world: World) -> None:
        self._host, self._port = config.tracking.prometheus_host, config.tracking.prometheus_port
        self._serves = self._port is not None and world.rank == 0
        self._file = config.job.folder / TARGETS
        self._run, self._recipe, self._status, self._world = run_name(config), recipe, status, world
        self._latest: Mapping[str, float] = {}
        self._logged_at: float | None = None
        self._server: _Server | None = None

    def __enter__(self) -> PrometheusEndpoint:
        if self._serves:
            self._server = _Server(self._host, self._port or 0, self)
            threading.Thread(target=self._server.serve_forever, daemon=True, name="prometheus").start()
            self._write_target(self._server.server_port)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            with suppress(OSError):
                self._file.unlink()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Implements `Tracker.log`."""
        # A new mapping: a request may be reading the old one.
        self._latest, self._logged_at = {**self._latest, **metrics}, time.time()

    def close(self) -> None:
        """Implements `Tracker.close`; the endpoint is served until the run has ended."""

    def text(self) -> str:
        """Returns what is served now; called by any thread."""
        return exposition(self._gauges(), {"run": self._run})

    def _gauges(self) -> Iterator[Gauge]:
        for name, value in self._latest.items():
            yield Gauge(metric_name(name), f"{name} of the latest iteration that has it", value)
        status, watchdog = self._status.current(), self._world.watchdog
        yield Gauge(f"{PREFIX}info", "1; recipe and host of rank 0", 1, {"recipe": self._recipe, "host": status.host})
        yield Gauge(f"{PREFIX}state", "1; state of the run", 1, {"state": status.state})
        yield Gauge(f"{PREFIX}phase", "1; phase of rank 0", 1, {"phase": status.phase or "none"})
        yield Gauge(f"{PREFIX}iteration", "iterations done", status.iteration)
        yield Gauge(f"{PREFIX}iterations", "iterations of the whole run", status.iterations)
        yield Gauge(f"{PREFIX}ranks", "number of ranks", status.ranks)
        yield Gauge(f"{PREFIX}start_time_seconds", "start of the run in Unix seconds", status.started)
        if status.checkpoint is not None:
            yield Gauge(f"{PREFIX}checkpoint_iteration", "iteration of the last checkpoint", status.checkpoint)
        if status.eta_seconds is not None:
            yield Gauge(f"{PREFIX}eta_seconds", "expected seconds until the end", status.eta_seconds)
        if self._logged_at is not None:
            yield Gauge(f"{PREFIX}logged_time_seconds", "end of the last iteration in Unix seconds", self._logged_at)
        silent = watchdog.seconds_without_progress if watchdog else self._status.seconds_without_progress
        yield Gauge(f"{PREFIX}seconds_without_progress", "seconds since any rank has made progress", silent)
        for rank, seconds in sorted(watchdog.heartbeat_ages().items()) if watchdog else ():
            labels = {"rank": str(rank)}
            yield Gauge(f"{PREFIX}heartbeat_age_seconds", "seconds since the heartbeat of a rank", seconds, labels)

    def _write_target(self, port: int) -> None:
        host = socket.gethostname() if self._host in ANY_ADDRESS else self._host
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        # Prometheus may read the file at any time; without it, the run is only not found.
        with suppress(OSError), replacing(self._file) as file:
            file.write_text(json.dumps([{"targets": [target]}]) + "\n", encoding="utf-8")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, endpoint: PrometheusEndpoint) -> None:
        self.endpoint = endpoint
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UserError(
                f"tracking.prometheus_port={port}: cannot listen on {host} ({reason}). Choose another port, or 0 for a "
                "free one."
            ) from None


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 60

    def do_GET(self) -> None:
        is_metrics = self.path.partition("?")[0] == PATH
        body = (self.server.endpoint.text() if is_metrics else f"The metrics are at {PATH}\n").encode()
        self.send_response(200 if is_metrics else 404)
        self.send_header("Content-Type", CONTENT_TYPE if is_metrics else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Prints nothing: the console shows the training."""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
