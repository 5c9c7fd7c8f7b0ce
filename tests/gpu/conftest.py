"""Tests for GPUs: their marker, their time limits, and a file with the outcome of each."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.machine import Machine
from tests.helpers.rank_pool import RankPool
from verl_mg.layout import Layout

FOLDER = Path(__file__).parent
LIMIT_S = {"gpu": 90, "cpu": 500}  # seconds of a test; one with the marker `timeout` has its own on GPUs
STACKS_S = 10  # seconds before a limit at which ranks are ended, so that the test can report where they were


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="append a JSON line to this file when a test starts and ends")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("outcomes", None)
    if file is not None:
        config.pluginmanager.register(Outcomes(file, Machine.this(config.option.most_ranks)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of this folder before those with markers are deselected."""
    on_gpus = bool(Machine.this().gpus)
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            own = item.get_closest_marker("timeout")
            limit = own.args[0] if own and on_gpus else LIMIT_S["gpu" if on_gpus else "cpu"]
            item.add_marker(pytest.mark.timeout(limit), append=False)
            item.add_marker(pytest.mark.needs(ranks=ranks_of(item)))


def ranks_of(item: pytest.Item) -> int:
    """Ranks without which a test cannot run, by its parameters."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    layout = parameters.get("layout")
    return parameters.get("count") or (Layout.parse(layout).ranks if layout else 1)


class Outcomes:
    """Writes what happened to each test at once, so that nothing is lost where the suite itself is ended."""

    def __init__(self, file: Path, machine: Machine) -> None:
        self._file, self._machine = file, machine
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def _write(self, test: str, outcome: str, reason: str = "") -> None:
        line = {"name": test, "outcome": outcome, "seconds": self._seconds[test], "reason": reason}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """With --collect-only, what is missing for each test."""
        if session.config.option.collectonly:
            for item in session.items:
                missing = self._machine.missing_for(item)
                self._write(item.nodeid, "skipped" if missing else "not started", missing or "")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid, "did not end")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self._write(report.nodeid, report.outcome, reason_of(report))


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped or failed, in one line."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = [line for line in (crash.message if crash else str(report.longrepr or "")).splitlines() if line.strip()]
    # A rank's message is its traceback, which ends with the error.
    return "".join(lines[:1]) if len(lines) < 2 or "Traceback" not in lines[0] else f"{lines[0]} {lines[-1]}"


@pytest.fixture(autouse=True)
def limited_ranks(request) -> Iterator[None]:
    """Ranks end before their test does."""
    if "ranks" not in request.fixturenames:
        yield
        return
    pool: RankPool = request.getfixturevalue("ranks")
    before, marker = pool.timeout_s, request.node.get_closest_marker("timeout")
    pool.timeout_s = marker.args[0] - STACKS_S
    yield
    pool.timeout_s = before


@pytest.fixture(scope="session")
def expected(tmp_path_factory) -> Callable[[Path], object]:
    """What `transformers` computes on the CPU in float32, of twelve random rows."""
    from tests.helpers.tiny_models import oracle, random_rows
    from tests.megatron.training import train_in_plain_torch  # every run imports this file
    from verl_mg.models.hf_config import read_config

    @cache
    def of(model: Path) -> object:
        rows = random_rows(12, read_config(model).vocab)
        return train_in_plain_torch(oracle(model), rows, tmp_path_factory.mktemp("oracle"))

    return of


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """A model of each kind for float32, and one with wider heads for kernels in 16 bits."""
    from tests.megatron.layout_models import HALF_HEAD_DIM, ModelFolders, make_model

    models = ModelFolders(tmp_path_factory.mktemp("models"))
    for name in ("dense", "mixture", "capped", "latent"):
        models[f"half {name}"] = make_model(tmp_path_factory.mktemp("half"), name, head_dim=HALF_HEAD_DIM)
    return models
