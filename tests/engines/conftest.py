"""Real engines of each kind with one model of experts; a worker starts each of them once."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import second_runner
from tests.helpers.engines import VERSION, bring_weights, options_of
from verl_mg.engines.hf import HFEngine
from verl_mg.engines.kinds import PROCESSES
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.models.tiny_model import make_tiny_model


@pytest.fixture(scope="package")
def mixtures(tmp_path_factory) -> list[Path]:
    """Models of experts with other weights."""
    sizes: dict[str, Any] = {"hidden": 32, "head_dim": 32, "ffn": 64, "max_positions": 256, "init_std": 0.2}
    folder = tmp_path_factory.mktemp("mixtures")
    return [
        make_tiny_model(folder / str(seed), "qwen3_moe", characters="abcdefgh", seed=seed, **sizes)
        for seed in (3, 4, 5)
    ]


@pytest.fixture(scope="package")
def wholes(mixtures) -> list[Any]:
    """The same in `transformers`, which compute without an engine."""
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in mixtures]


@pytest.fixture(scope="package")
def started(request, mixtures, tmp_path_factory) -> Iterator[Any]:
    if request.param == "hf":
        hf = HFEngine(mixtures[0], "cpu", torch.float32, 16)
        hf.begin_update()
        hf.end_update(VERSION)
        yield hf
        return
    log, kind, options = tmp_path_factory.mktemp("log") / "0.log", PROCESSES.get(request.param), {}
    if kind is None:
        kind, options = second_runner.kind_with_links_in(tmp_path_factory.mktemp("path")), second_runner.OPTIONS
    with closing(ProcessEngine(kind, mixtures[0], options_of(kind.name, **options), log)) as engine:
        yield engine


@pytest.fixture
def engine(started, mixtures) -> Any:
    """An engine that runs and has the first of the `mixtures` as VERSION, whatever the test before has done to it."""
    if not started.health() and started.version >= 0:
        started.restart()
    if started.version != VERSION:
        bring_weights(started, mixtures[0], VERSION)
    return started


@pytest.fixture
def on_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
