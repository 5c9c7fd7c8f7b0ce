"""Endpoint for Prometheus: its format, what a real Prometheus reads from a running job, and the Grafana dashboard."""

import json
import math
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch.distributed import HashStore

from tests.helpers.launched import LONG, PATIENCE_S, ROOT, started, torchrun, write_inputs
from tests.helpers.tiny_jobs import DIGITS, files_of, logged
from verl_mg.config import Config
from verl_mg.distributed.world import World
from verl_mg.engines.engine import DRAFTED, PROMPT, VERIFIED, count_metrics, observed_load
from verl_mg.engines.ports import PortBlock
from verl_mg.errors import UserError
from verl_mg.monitor.metrics import GPU_MEMORY, GPU_UTILIZATION, over_ranks
from verl_mg.monitor.prometheus import Gauge, PrometheusEndpoint, exposition, metric_name
from verl_mg.monitor.status import StatusFile

UNPACKED = ROOT / ".venv" / "prometheus" / "usr" / "bin" / "prometheus"
PROMETHEUS = shutil.which("prometheus") or (str(UNPACKED) if UNPACKED.exists() else None)
SETTINGS = """
global: {scrape_interval: 500ms}
scrape_configs:
  - job_name: verl_mg
    file_sd_configs: [{files: ["%s"], refresh_interval: 1s}]
"""


HOST = "127.0.0.2"  # not the default


def configuration(folder: Path, port: int | None = 0) -> Config:
    tracking = {"prometheus_port": port, "prometheus_host": HOST, "name": 'the "first"'}
    tree = {"model": {"path": "m"}, "data": {"train": "d"}, "job": {"output": folder}, "tracking": tracking}
    return Config.model_validate(tree)


@contextmanager
def endpoint(folder: Path, port: int | None = 0, rank: int = 0) -> Iterator[PrometheusEndpoint]:
    config, world = configuration(folder, port), World(rank, 2, HashStore())
    with StatusFile(folder, "grpo", 4, rank, 2) as status, PrometheusEndpoint(config, "grpo", status, world) as served:
        yield served


def target(folder: Path) -> str:
    ((address,),) = (entry["targets"] for entry in json.loads((folder / "prometheus.json").read_text()))
    return str(address)


def test_exposition_is_read_back_by_the_parser_of_prometheus():
    parser = pytest.importorskip("prometheus_client.parser")
    odd = 'a "quoted" \\ and\nbroken'
    gauges = [
        Gauge(metric_name("eval/pass@4"), odd, 0.1 + 0.2),
        Gauge("b", "second", math.nan, {"kind": odd}),
        Gauge("b", "second", -math.inf, {"kind": "other"}),
        Gauge("b", "second", 1e-300, {"kind": "other"}),
    ]
    text = exposition(gauges, {"run": odd})
    first, second = parser.text_string_to_metric_families(text)
    assert (first.name, first.type, first.documentation) == ("verl_mg_eval_pass_4", "gauge", odd)
    assert [(sample.labels, sample.value) for sample in first.samples] == [({"run": odd}, 0.1 + 0.2)]
    one, two = second.samples
    assert one.labels == {"run": odd, "kind": odd} and math.isnan(one.value)
    assert two.labels == {"run": odd, "kind": "other"} and two.value == 1e-300


def test_endpoint_serves_the_latest_value_of_each_metric(tmp_path):
    with endpoint(tmp_path) as served:
        address = target(tmp_path)
        assert address.startswith(f"{HOST}:")
        served.log(1, {"reward/mean": 0.25, "eval/reward": 0.5})
        served.log(2, {"reward/mean": 0.75})
        response = httpx.get(f"http://{address}/metrics", trust_env=False)
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = response.text.splitlines()
        label = 'run="the \\"first\\""'
        assert f"verl_mg_reward_mean{{{label}}} 0.75" in lines and f"verl_mg_eval_reward{{{label}}} 0.5" in lines
        assert f'verl_mg_state{{{label},state="starting"}} 1.0' in lines
        assert httpx.get(f"http://{address}/", trust_env=False).status_code == 404
    assert not (tmp_path / "prometheus.json").exists()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{address}/metrics", trust_env=False)


@pytest.mark.parametrize(("port", "rank"), [(None, 0), (0, 1)])
def test_endpoint_without_a_port_or_on_other_ranks_listens_nowhere(tmp_path, port, rank):
    with endpoint(tmp_path, port, rank):
        assert not (tmp_path / "prometheus.json").exists()


def test_endpoint_port_in_use_raises(tmp_path):
    with socket.socket() as used:
        used.bind((HOST, 0))
        used.listen()
        port = used.getsockname()[1]
        message = rf"tracking.prometheus_port={port}: cannot listen on {HOST} \(address already in use\)"
        with pytest.raises(UserError, match=message), endpoint(tmp_path, port):
            pass


OF_ENGINES = tuple(count_metrics([observed_load(1, 1, 1, 2) | {PROMPT: 1, DRAFTED: 1, VERIFIED: 1}]))
"""Metrics of engines in processes of their own."""
OF_GPUS = ("time/mfu", *over_ranks([{GPU_MEMORY: 1.0, GPU_UTILIZATION: 0.5}]))
"""Metrics of ranks on GPUs."""


def expressions() -> list[str]:
    """The queries of the panels of launch/grafana.json, of all runs."""
    panels = json.loads((ROOT / "launch" / "grafana.json").read_text(encoding="utf-8"))["panels"]
    queries = [part["expr"] for panel in panels for part in panel.get("targets", [])]
    return [query.replace("$run", ".*") for query in queries]


class Prometheus:
    """A running Prometheus."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self._process, self._url = process, url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Labels and value of each series of an expression now; [] until it answers."""
        assert self._process.poll() is None
        try:
            url = f"{self._url}/api/v1/query"
            answer = httpx.get(url, params={"query": expression}, trust_env=False).json()
        except httpx.TransportError:
            return []
        assert answer["status"] == "success", answer
        return [series["metric"] | {"value": float(series["value"][1])} for series in answer["data"]["result"]]

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """The same as soon as there is one."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.query(expression)):
            assert time.monotonic() < deadline, expression
            time.sleep(0.1)
        return found


@contextmanager
def prometheus(folder: Path, targets: Path) -> Iterator[Prometheus]:
    (folder / "prometheus.yml").write_text(SETTINGS % targets)
    ports = PortBlock()
    address = f"127.0.0.1:{ports.ports[0]}"
    assert PROMETHEUS is not None
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/series"]
    command = [PROMETHEUS, *options, f"--web.listen-address={address}", "--log.level=error"]
    process = subprocess.Popen(command, cwd=folder)
    try:
        yield Prometheus(process, f"http://{address}")
    finally:
        process.kill()
        process.wait()
        ports.close()


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed; tools/install/prometheus.sh unpacks it")
def test_prometheus_reads_a_running_job_and_the_dashboard_finds_its_metrics(tmp_path):
    inputs, output = write_inputs(tmp_path / "inputs"), tmp_path / "run"
    (inputs / "reward.py").write_text(DIGITS)
    overrides = [
        *files_of(inputs, output),
        "tracking.prometheus_port=0",
        f"job.iterations={LONG}",
        "job.save=false",
        "algorithm.prompts_per_iteration=2",
        "algorithm.group_size=2",
        "rollout.max_new_tokens=4",
        f"reward.function={inputs / 'reward.py'}:digits",
        f"data.test={inputs / 'sums.jsonl'}",
        "evaluation.every=2",
        "evaluation.prompts=2",
    ]
    command = [*torchrun(2), "-m", "verl_mg", "train", "recipes/grpo.py", *overrides]
    output.mkdir()
    with prometheus(tmp_path, output / "prometheus.json") as scraped, started(command) as launcher:
        launcher.iterations_done(output, 3)
        labels = {"run": "run", "job": "verl_mg", "instance": target(output)}
        (iteration,) = scraped.wait_for("verl_mg_iteration > 2")
        assert {name: iteration[name] for name in labels} == labels
        (rewards,) = scraped.wait_for("last_over_time(verl_mg_reward_mean[1m]) and verl_mg_iteration > 2")
        assert rewards["value"] in [line.get("reward/mean") for line in logged(output)]
        (loss,) = scraped.wait_for("verl_mg_actor_loss")
        assert loss["value"] in [line.get("actor/loss") for line in logged(output)]
        assert [series["rank"] for series in scraped.wait_for("verl_mg_heartbeat_age_seconds < 60")] == ["1"]
        assert scraped.wait_for('verl_mg_state{state="running"} == 1') and scraped.wait_for("verl_mg_phase")
        assert [series["value"] for series in scraped.wait_for("verl_mg_ranks")] == [2.0]
        assert {series["recipe"] for series in scraped.wait_for("verl_mg_info")} == {"grpo"}
        absent = {f'{metric_name(name)}{{run=~".*"}}' for name in (*OF_GPUS, *OF_ENGINES)}
        assert absent < set(expressions())
        for query in expressions():
            # A scrape that failed on a busy machine empties all series until the next one.
            assert not scraped.query(query) if query in absent else scraped.wait_for(query)
