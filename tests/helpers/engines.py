"""Real engines in tests: which there are, their processes, and a checkpoint's weights brought into one."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.helpers import warm_start
from tests.helpers.traces import needs_sglang, needs_vllm
from verl_mg import device
from verl_mg.checkpoint.hf_safetensors import CheckpointReader, load_shards
from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.engines.engine import Request, RolloutEngine, Sample, Sampling
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.payloads import Staging
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.engines.sglang.arguments import has_multi_token_draft
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.models.hf_tensors import with_multi_token_layer
from verl_mg.sharding.boxes import Shard, slices
from verl_mg.sharding.weight_table import weight_table

SGLANG = pytest.param("sglang", marks=needs_sglang)
VLLM = pytest.param("vllm", marks=needs_vllm)
VLLM_NIGHTLY = pytest.param("vllm", marks=[needs_vllm, pytest.mark.nightly])
SECOND_RUNNER = pytest.param("vllm with its second model runner", marks=[needs_vllm, pytest.mark.nightly])
VERSION = 7
"""Version of the weights that an engine of `tests/engines/conftest.py` has when a test begins."""
WORKERS = ("sglang::scheduler", "VLLM::Worker")
"""Titles of the processes that compute."""


def overrides(engine: str) -> list[str]:
    """Configuration of a job with engines of this kind."""
    return [f"rollout.engine={engine}", *([f"rollout.python={warm_start.vllm().python}"] if engine == "vllm" else [])]


def options_of(kind: str, **changes: Any) -> EngineOptions:
    """Options of a small engine on the CPU."""
    python = Path(warm_start.vllm().python) if kind == "vllm" else None
    options: dict[str, Any] = {"max_running": 16, "max_positions": 256, "routed_experts": True, "python": python}
    return EngineOptions(**({"layout": EngineLayout(), "dtype": torch.float32} | options | changes))


def process_of(engine: ProcessEngine) -> psutil.Process:
    """The process of an engine, of which the engine's own processes are children."""
    warm = getattr(warm_start, engine.kind.name)()
    return psutil.Process(warm.program_of(engine.pid) or engine.pid)


def workers_of(engine: ProcessEngine) -> list[psutil.Process]:
    """The processes of an engine that compute."""
    children = process_of(engine).children(recursive=True)
    return [child for child in children if any(title in " ".join(child.cmdline()) for title in WORKERS)]


def bring_weights(
    engine: ProcessEngine,
    model: Path,
    version: int,
    traced: Sequence[dict[str, Shard]] | None = None,
    padding: float = 0.0,
) -> None:
    """As a sync does it, each rank's shard of the table, or of a trace, read from the checkpoint.

    Rows that pad a parameter get the value of `padding`, every second one its negative.
    """
    engine.begin_load()
    held = weights_of(engine, model, traced, padding)
    engine.loaded(engine.load([staging.payload() for staging in held], version))


def weights_of(
    engine: ProcessEngine, model: Path, traced: Sequence[dict[str, Shard]] | None = None, padding: float = 0.0
) -> list[Staging]:
    """What `bring_weights` brings to each rank."""
    held = []
    for shards in traced or _shards_of_table(engine, model):
        dtypes = dict.fromkeys(shards, engine.options.dtype)
        held.append(Staging(shards, dtypes, device.current_device()))
        reader = CheckpointReader(ModelDirectory.find(model))
        load_shards(reader, shards, held[-1].tensors)  # from memory that is not pinned: complete when it returns
        for name, shard in shards.items():
            for box in shard.padding:
                rows = held[-1].tensors[name][slices(box)]
                rows[::2], rows[1::2] = padding, -padding
    return held


def _shards_of_table(engine: ProcessEngine, model: Path) -> list[dict[str, Shard]]:
    layout, config = engine.options.layout, with_multi_token_layer(read_config(model), model)
    table = weight_table(config).for_engine(engine.kind.name)
    if has_multi_token_draft(engine.options.extra):
        table = table.with_draft_model()
    return [dict(table.engine_shards(layout, rank)) for rank in range(layout.ranks)]


def requests(count: int = 6) -> list[Request]:
    """Requests with prompts of four tokens."""
    return [Request(10 + i, (6 + i % 8, 7, 9, 11), i) for i in range(count)]


def all_of(engine: RolloutEngine, count: int, seconds: float = 600.0, wait: float = 0.5) -> list[Sample]:
    """Collects samples, for which each look waits up to `wait` seconds; sorted by id."""
    samples: list[Sample] = []
    until = time.monotonic() + seconds
    while len(samples) < count and time.monotonic() < until:
        samples += engine.collect(wait)
    assert len(samples) == count
    return sorted(samples, key=lambda sample: sample.id)


def cut_short(engine: RolloutEngine, requested: Sequence[Request], sampling: Sampling) -> list[Sample]:
    """Partial samples of requests that are aborted at work; sorted by id.

    Repeated where the abort came before the first token or after the last one, as on a busy machine.
    """
    seconds = 0.15
    for _ in range(50):
        engine.submit(requested, sampling)
        timer = threading.Timer(seconds, engine.abort)  # an engine in this process collects until it is aborted
        timer.start()
        samples = all_of(engine, len(requested))
        timer.join()
        if {sample.finish for sample in samples} != {"abort"}:
            seconds /= 2
        elif not any(sample.tokens for sample in samples):
            seconds *= 2
        else:
            return sorted(samples, key=lambda sample: sample.id)
    raise AssertionError("no abort comes while the requests are at work")


def late_and_other(
    engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch, sampling: Sampling, seconds: float = 0.05
) -> list[Sample]:
    """Samples of a request with a time limit of `seconds`, and of another that has enough time.

    Repeated where the first one was complete before this process looked for late requests.
    """
    for _ in range(50):
        for number, limit in ((1, seconds), (2, 1000.0)):
            monkeypatch.setattr(engine, "_request_timeout", limit)
            engine.submit([Request(number, (6, 7), 1)], sampling)
        samples = all_of(engine, 2, wait=0.01)
        if samples[0].finish == "timeout":
            return samples
    raise AssertionError("a late request is never aborted")
