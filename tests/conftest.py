"""Options and fixtures of all tests: the pool of ranks, the sandbox, the real GSM8K."""

import gc
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# torch asks the driver whether there are GPUs. If it asked CUDA, processes forked from this one could not use them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# The processes of pytest-xdist, which inherit it, have the servers of `warm_start` in common.
os.environ.setdefault("WARM_START_OWNER", str(os.getpid()))

import pytest
import torch
from hypothesis import settings

from tests.helpers.fake_cuda import FakeCudaProcess
from tests.helpers.interpreted_triton import use_kernels
from tests.helpers.machine import Machine
from tests.helpers.rank_pool import RankPool
from tests.helpers.s3_server import S3Server, s3_server
from tests.helpers.separate_ranks import SeparateRanks
from tests.helpers.tiny_models import MIXTURES, TRAINED, tiny_model
from tests.transformer_engine.on_cpu import installed, load
from verl_mg.sandbox import run_python

torch.set_num_threads(1)
# A machine under load is slow, not wrong; the same examples every time make a failure reproducible.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

_MACHINE, _POOL = pytest.StashKey[Machine](), pytest.StashKey[RankPool]()


QUICK = ("algorithms", "data", "layout", "models", "planner", "reshard", "rewards", "sharding")
"""Folders, besides the modules at the top, whose tests are pure; `--quick` selects them."""
SLOW_FIXTURES = {"ranks", "fake_cuda", "transformer_engine", "kernel_ranks", "runs", "sandbox", "hosts", "checkpointed"}
SLOW_MODULES = {
    *("test_api", "test_cli", "test_docs", "test_doctor", "test_fuzz", "test_launch"),
    *("test_quickstart", "test_support", "test_two_hosts"),
    *("planner/test_search", "rewards/test_code", "rewards/test_worker_pool", "rewards/test_service"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests without ranks, engines and processes")
    parser.addoption("--most-ranks", type=int, default=0, help="start no more ranks than these; skip tests of more")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_MACHINE] = Machine.this(config.option.most_ranks)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --quick, do not import modules that are not selected."""
    place = collection_path.relative_to(Path(__file__).parent).with_suffix("")
    if not config.option.quick or not place.parts:
        return None
    selected = place.parts[0] in QUICK or (place.name.startswith("test_") and len(place.parts) == 1)
    return True if place.as_posix() in SLOW_MODULES or not selected else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect `nightly` and `gpu` tests unless -m names them, and with --quick those that need processes."""
    deselected: set[pytest.Item] = set()
    for marker in ("nightly", "gpu"):
        if marker not in config.option.markexpr:
            deselected.update(item for item in items if item.get_closest_marker(marker))
    if config.option.quick:
        deselected.update(item for item in items if SLOW_FIXTURES & set(getattr(item, "fixturenames", ())))
    # Slow files first, so that no test process is left with one of them at the end.
    items[:] = sorted((item for item in items if item not in deselected), key=_is_pure)
    config.hook.pytest_deselected(items=list(deselected))


def _is_pure(item: pytest.Item) -> bool:
    return item.path.relative_to(Path(__file__).parent).parts[0] in QUICK


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the ranks when the test modules are known and nothing has run yet, so that no thread is copied."""
    machine = session.config.stash[_MACHINE]
    machine.set_variables()
    if not session.config.option.quick and not machine.gpus:
        _use_warm_starts_for_sglang()
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        from tests.helpers.warm_start import IMPORTED_IN_FUNCTIONS

        for module in ("verl_mg.job.job", "verl_mg.run.loop", *IMPORTED_IN_FUNCTIONS):  # once here, not once a rank
            importlib.import_module(module)

        pool = session.config.stash[_POOL] = RankPool(machine)
        if not session.config.option.collectonly and not machine.gpus:
            pool.start()
    # Imports are never garbage, and tables of large models are millions of objects: it was a quarter of pure tests.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _use_warm_starts_for_sglang() -> None:
    """Start engines and traces without the imports of SGLang, in this process and in the ranks forked from it."""
    from tests.helpers import warm_start
    from verl_mg.engines import kinds

    kinds.sys = SimpleNamespace(executable=warm_start.sglang().python)  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose needs this machine does not have, before its fixtures are made."""
    if missing := item.config.stash[_MACHINE].missing_for(item):
        pytest.skip(missing)


@pytest.fixture(scope="session")
def machine(request) -> Machine:
    return request.config.stash[_MACHINE]


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """A tiny model of each architecture."""
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / name, name) for name in (*TRAINED, *MIXTURES)}


@pytest.fixture(scope="session")
def ranks(request) -> Iterator[RankPool]:
    pool = request.config.stash[_POOL]
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def s3(tmp_path_factory) -> Iterator[S3Server]:
    """An S3 server that the environment names."""
    pytest.importorskip("s3fs")
    with s3_server(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.variables.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="session")
def fake_cuda() -> Iterator[FakeCudaProcess]:
    """A process in which the CPU passes for a GPU."""
    with FakeCudaProcess() as process:
        yield process


@pytest.fixture(scope="session")
def transformer_engine() -> Iterator[SeparateRanks]:
    """Ranks on the CPU that have Transformer Engine."""
    if torch.cuda.is_available():
        pytest.skip("the CPU platform is for machines without a GPU")
    with SeparateRanks(load, installed()) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def kernel_ranks() -> Iterator[SeparateRanks]:
    """Ranks on the CPU that compute rows of logits by kernels of Triton, which it interprets."""
    with SeparateRanks(use_kernels) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def sandbox():
    """A machine on which untrusted programs can be run at all."""
    try:
        run_python("")
    except OSError as error:
        pytest.skip(f"no interpreter that every user can start: {error}")


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """The folder with the real GSM8K files, next to the checkout."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"
    if not (folder / "train.jsonl").exists():
        pytest.skip(f"the real GSM8K is not at {folder}")
    return folder
