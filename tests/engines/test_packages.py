"""The processes of real engines leave alone what is installed beside them for training."""

import importlib.metadata
import json
import os
import re
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import warm_start
from tests.helpers.engines import options_of
from tests.helpers.traces import needs_sglang, needs_vllm
from verl_mg.engines.import_path.verl_mg import HIDDEN, hide_training_packages
from verl_mg.engines.kinds import PROCESSES
from verl_mg.engines.ports import PortBlock
from verl_mg.engines.process_engine import EngineProcess
from verl_mg.models.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
OF_VLLM = next(warm_start.VLLM_PYTHON.parents[1].glob("lib/python3*/site-packages"), Path())


@dataclass(frozen=True)
class Case:
    """An engine whose processes are forks of the server of the tests' engines, or begin as those of a job do."""

    engine: str
    python: str
    site: Path  # packages of the engine's environment
    processes: frozenset[str]  # parts of their titles


SGLANG_PROCESSES = frozenset({"sglang::scheduler", "sglang::detokenizer"})
VLLM_PROCESSES = frozenset({"VLLM::EngineCore"})
SITE = Path(sysconfig.get_path("purelib"))
nightly = pytest.mark.nightly


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(lambda: Case("sglang", warm_start.sglang().python, SITE, SGLANG_PROCESSES), marks=needs_sglang),
        pytest.param(lambda: Case("sglang", sys.executable, SITE, SGLANG_PROCESSES), marks=[needs_sglang, nightly]),
        pytest.param(lambda: Case("vllm", warm_start.vllm().python, OF_VLLM, VLLM_PROCESSES), marks=needs_vllm),
        pytest.param(
            lambda: Case("vllm", str(warm_start.VLLM_PYTHON), OF_VLLM, VLLM_PROCESSES), marks=[needs_vllm, nightly]
        ),
    ],
    ids=["sglang forked", "sglang spawned", "vllm forked", "vllm spawned"],
)
def case(request) -> Case:
    return request.param()


@pytest.fixture(scope="module")
def told(case, tmp_path_factory) -> Iterator[dict[str, Any]]:
    """What each process of a running engine has imported, by its title."""
    folder = tmp_path_factory.mktemp("told")
    sizes: dict[str, Any] = {"hidden": 32, "head_dim": 32, "ffn": 64, "max_positions": 256}
    model = make_tiny_model(folder / "model", "qwen3_moe", characters="abcdefgh", **sizes)
    # With a tokenizer SGLang has a process for it.
    options = replace(options_of(case.engine, reads_text=True), python=Path(case.python))
    kind, ports = PROCESSES[case.engine], PortBlock()
    program = kind.program(model, options, ports.ports, f"127.0.0.1:{ports.ports[1]}")
    path = os.pathsep.join([program.environment["PYTHONPATH"], str(ROOT)])
    variables = {"HOST": kind.host, "TOLD": str(folder), "PYTHONPATH": path}
    program = replace(program, module="tests.engines.packages_host", environment={**program.environment, **variables})
    process = EngineProcess.start(program, folder / "0.log", inherited=[ports.descriptor])
    process.wait_until_ready(600.0)
    warm = getattr(warm_start, case.engine)()
    main = psutil.Process(warm.program_of(process.pid) or process.pid)
    processes = [
        main,
        *(one for one in main.children(recursive=True) if "resource_tracker" not in " ".join(one.cmdline())),
    ]
    for one in processes:
        os.kill(one.pid, signal.SIGUSR2)
    files = {one: folder / f"{one.pid}.json" for one in processes}
    until = time.monotonic() + 600
    while not all(file.exists() for file in files.values()) and time.monotonic() < until:
        time.sleep(0.05)
    titles = {one: "main" if one is main else " ".join(one.cmdline()) for one in processes}
    yield {titles[one]: json.loads(file.read_text()) for one, file in files.items()}
    process.close()
    ports.close()


def required(distribution: importlib.metadata.Distribution, extras: bool = False) -> set[str]:
    lines = distribution.requires or ()
    return {re.split(r"[^\w.-]", line)[0].lower() for line in lines if extras or "extra ==" not in line}


def with_all_they_require(engine: str, site: Path) -> set[str]:
    """Distributions of the engine and all that it needs, in its environment."""
    installed = {one.name.lower(): one for one in importlib.metadata.distributions(path=[str(site)])}
    unread = [name for name in installed if name in (engine, f"{engine}-cpu")]
    found = set(unread)
    while unread:
        new = required(installed[unread.pop()]) - found
        found |= new
        unread += new & installed.keys()
    return found


def test_processes_of_an_engine_import_no_package_that_only_training_requires(told, case):
    of_training = required(importlib.metadata.distribution("verl-mg"), extras=True)
    of_training -= with_all_they_require(case.engine, case.site)
    packages_of = importlib.metadata.packages_distributions()
    for title, one in told.items():
        found = {
            package
            for package in one["packages"]
            if of_training & {distribution.lower() for distribution in packages_of.get(package, ())}
        }
        assert case.engine in one["packages"] and not found | set(HIDDEN) & set(one["packages"]), title
    assert {"megatron-core", "transformer-engine", "mpi4py", "wandb"} <= of_training
    assert all(any(part in title for title in told) for part in case.processes), list(told)


def test_processes_of_an_engine_keep_the_hook_that_releases_cuda_graphs(told):
    assert {title: one["memory_saver"] for title, one in told.items() if one["memory_saver"]} == {}


def test_hide_after_an_import_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, HIDDEN[0], sys)
    with pytest.raises(RuntimeError, match=HIDDEN[0]):
        hide_training_packages()
