"""Requests per second from the rollout to an engine and back, with a model that costs next to nothing.

    python -m tools.bench.bench_requests [--engine sglang] [--python PYTHON] [--requests 2048] [--group 8]
        [--prompt 32] [--tokens 4] [--running 256] [--rounds 5]

`SyncRollout.generate` on one rank with one engine, in turn with the engine's Python API (`engine_api`), which
gets all requests in one list. Prints for each of them the requests per second and the CPU microseconds of a request: in
the rank, in the engine's main process, which has our host and the part of the engine that takes requests, and in its
further processes, of scheduler and model. Medians over the rounds after a warm-up, and the messages and requests to the
store of a round. `--python` is the interpreter of the engine, for vLLM.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore, Store, TCPStore

from tools.bench import engine_api
from tools.bench.harness import on_ranks, options_of
from verl_mg.checkpoint.hf_safetensors import CheckpointReader, load_shards
from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.data import Prompt, PromptFeed, PromptSet
from verl_mg.engines.engine import Request, Sampling
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.engines.kinds import PROCESSES
from verl_mg.engines.payloads import Staging
from verl_mg.engines.process_engine import EngineProcess, ProcessEngine
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor
from verl_mg.rollout.engine_group import EngineGroup, HFEngineGroup, InFlightEngineGroup
from verl_mg.rollout.rollout import RolloutSetup
from verl_mg.rollout.sync_rollout import SyncRollout
from verl_mg.sharding.weight_table import weight_table

VOCAB = 64
# Seconds of a round, and CPU seconds of the rank, of the engine's main process and of its further ones.
Cost = tuple[float, ...]


class CountedStore:
    """Store that counts the requests it gets, by method."""

    def __init__(self, inner: Store, requests: Counter[str]) -> None:
        self._inner, self._requests = inner, requests

    def __getattr__(self, name: str) -> Any:
        self._requests[name] += 1
        return getattr(self._inner, name)


class LoadedEngines(InFlightEngineGroup):
    """Engines that have their weights, and keep them."""

    def update_weights(self, actor: Actor) -> dict[str, float]:
        """Does nothing: the weights are loaded once."""
        return {}

    def recover(self, engine: int) -> None:
        """Does nothing: the engine of a benchmark is not restarted."""


def main() -> None:
    """Runs the two sides on a rank."""
    parser = options_of(__doc__, requests=2048, group=8, prompt=32, tokens=4, running=256, rounds=5)
    parser.add_argument("--engine", choices=("hf", *PROCESSES), default="sglang")
    parser.add_argument("--python", type=Path)
    on_ranks(1, measure, parser.parse_args())


def measure(rank: int, store: Store, chosen: argparse.Namespace) -> None:
    """Prints the figures of both sides."""
    folder = Path(tempfile.mkdtemp())
    model = make_tiny_model(folder / "model", "qwen3", hidden=64, layers=1, heads=2, kv_heads=2, head_dim=32, ffn=128)
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randint(3, VOCAB // 2, (chosen.requests // chosen.group, chosen.prompt), generator=draw).tolist()
    prompts = [Prompt(i, tuple(tokens), "", None, {}) for i, tokens in enumerate(drawn)]
    context, messages = JobContext(TCPStore("127.0.0.1", 0, 1, True)), Counter[str]()
    alone, engines = sides(chosen, model, folder, [prompt.tokens for prompt in prompts], context, messages)
    sampling = Sampling(max_new_tokens=chosen.tokens)
    setup = RolloutSetup(sampling=sampling, seed=0, context=context, prompts=PromptFeed(PromptSet(prompts)), records=[])
    rollout = SyncRollout(engines, setup)
    requests = Counter[str]()
    if not isinstance(rollout._store, HashStore):  # else they do not leave the rank
        rollout._store = CountedStore(rollout._store, requests)

    def ours() -> Cost:
        context.timer.take()
        before = cpu_of(engines)
        rows = rollout.generate(prompts, chosen.group)
        after = cpu_of(engines)
        assert rows.total_tokens == chosen.requests * (chosen.prompt + chosen.tokens)
        seconds = sum(value for name, value in context.timer.take().items() if "generate" in name)
        rollout.start_iteration(1, is_last=True)
        return seconds, *(end - begin for begin, end in zip(before, after, strict=True))

    costs: dict[str, list[Cost]] = {"API of the engine": [], "rollout": []}
    for _ in range(chosen.rounds + 1):
        costs["API of the engine"].append(alone())
        messages.clear(), requests.clear()
        costs["rollout"].append(ours())
    print(f"{chosen.engine}: {chosen.requests} requests of {chosen.tokens} tokens, {chosen.running} at the same time")
    for name, values in costs.items():
        seconds, *cpu = map(statistics.median, zip(*values[1:], strict=True))
        parts = " ".join(f"{1e6 * value / chosen.requests:7.0f}" for value in cpu)
        print(f"{name:17} {chosen.requests / seconds:7.0f} requests/s; CPU microseconds of rank, main, others: {parts}")
    print(f"messages {dict(messages)}, and requests to the store {dict(requests)}")
    rollout.close()


def cpu_of(engines: EngineGroup) -> Cost:
    """Returns the CPU seconds so far of the rank, of the engine's main process and of its further ones."""
    of_engine = engine_api.cpu_seconds(engines.engine.pid) if isinstance(engines.engine, ProcessEngine) else (0.0, 0.0)
    return time.process_time(), *of_engine


def sides(
    chosen: argparse.Namespace,
    model: Path,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    context: JobContext,
    messages: Counter[str],
) -> tuple[Callable[[], Cost], EngineGroup]:
    """Returns a round of the engine's API, and the engine of the rollout, whose messages are counted."""
    repeated = [prompt for prompt in prompts for _ in range(chosen.group)]
    if chosen.engine == "hf":
        engine = HFEngine(model, "cpu", torch.float32, max_running_requests=chosen.running)
        requests = [Request(i, tuple(prompt), i) for i, prompt in enumerate(repeated)]

        def alone() -> Cost:
            started, before = time.perf_counter(), time.process_time()
            engine.generate(requests, Sampling(max_new_tokens=chosen.tokens))
            return time.perf_counter() - started, time.process_time() - before, 0.0, 0.0

        return alone, HFEngineGroup(engine, context)
    options = EngineOptions(
        layout=EngineLayout(),
        dtype=torch.float32,
        max_running=chosen.running,
        max_positions=chosen.prompt + chosen.tokens + 8,
        python=chosen.python and chosen.python.absolute(),
    )
    kind = PROCESSES[chosen.engine]
    other = subprocess.Popen(
        [str(chosen.python or sys.executable), engine_api.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(folder / "api.log").open("wb"),
        text=True,
        env=kind.environment(model, options),
    )
    assert other.stdin and other.stdout
    task = {"engine": chosen.engine, "arguments": kind.arguments(model, options) | {"load_format": "auto"}}
    questions, answers = other.stdin, other.stdout

    def ask(question: Any) -> Any:
        questions.write(json.dumps(question) + "\n")
        questions.flush()
        return json.loads(answers.readline())

    assert ask(task | {"prompts": repeated, "tokens": chosen.tokens}) == "ready"

    def alone() -> Cost:
        seconds, main, others = ask("go")
        return seconds, 0.0, main, others

    count_messages(messages)
    engine = ProcessEngine(kind, model, options, folder / "engine.log")
    load_weights(engine, model)
    return alone, LoadedEngines(engine, [True], context, False, lambda inner: inner)


def count_messages(messages: Counter[str]) -> None:
    """Counts the messages of all engines from now on, by direction."""
    send, handle = EngineProcess.send, ProcessEngine._handle

    def counted_send(process: EngineProcess, message: Any) -> None:
        messages["to the engine"] += 1
        send(process, message)

    def counted_handle(engine: ProcessEngine, message: Any) -> None:
        messages["from the engine"] += 1
        handle(engine, message)

    EngineProcess.send, ProcessEngine._handle = counted_send, counted_handle


def load_weights(engine: ProcessEngine, model: Path) -> None:
    """Brings the weights of a checkpoint into an engine of one rank."""
    shards = weight_table(read_config(model)).for_engine(engine.kind.name).engine_shards(EngineLayout(), 0)
    staging = Staging(shards, dict.fromkeys(shards, torch.float32), torch.device("cpu"))
    load_shards(CheckpointReader(ModelDirectory.find(model)), shards, staging.tensors)
    engine.loaded(engine.load([staging.payload()], 0))


if __name__ == "__main__":
    main()
