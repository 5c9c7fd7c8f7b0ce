"""Real engines with agents around them, whose requests and samples are logged."""

import string
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.agents.agent_runs import RunAgents, runner_of
from tests.agents.conversations import KEEPING, MARKS
from tests.helpers import warm_start
from tests.helpers.engines import SGLANG, VLLM_NIGHTLY, bring_weights
from verl_mg.engines.engine import RolloutEngine
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.engines.kinds import PROCESSES
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.layout import EngineLayout
from verl_mg.models.tiny_model import make_tiny_model

POSITIONS = 1024


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory) -> Path:
    """A tiny model whose chat template has tools."""
    return make_tiny_model(
        tmp_path_factory.mktemp("agents") / "model",
        "qwen2",
        characters=string.printable,
        words=MARKS,
        chat_template=KEEPING,
        hidden=32,
        ffn=64,
        heads=1,  # vLLM's attention on the CPU has no heads narrower than 32
        kv_heads=1,
        max_positions=POSITIONS,
        init_std=0.2,
        seed=5,
    )


@pytest.fixture(scope="session")
def hf_engine(chat_model) -> HFEngine:
    return HFEngine(chat_model, "cpu", torch.float32)


@pytest.fixture(scope="session", params=["hf", SGLANG, VLLM_NIGHTLY])
def any_engine(request, chat_model, hf_engine) -> Iterator[RolloutEngine]:
    """Each kind of engine with the weights of the model."""
    if request.param == "hf":
        yield hf_engine
        return
    python = warm_start.vllm().python if request.param == "vllm" else None
    settings = EngineOptions(
        layout=EngineLayout(), dtype=torch.float32, max_running=16, max_positions=POSITIONS, python=python
    )
    engine = ProcessEngine(PROCESSES[request.param], chat_model, settings, chat_model.parent / f"{request.param}.log")
    bring_weights(engine, chat_model, version=3)
    yield engine
    engine.close()


@pytest.fixture
def run_agents(chat_model) -> RunAgents:
    """Runs an agent on requests, and returns the samples and the log of the engine."""
    return runner_of(chat_model, POSITIONS)
