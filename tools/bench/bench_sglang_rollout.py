"""Measures the overhead over SGLang: tokens/s compared with direct calls of `sglang.Engine.generate`.

    python -m tools.bench.bench_sglang_rollout [--requests 256] [--tokens 64] [--running 64] [--rounds 5] [--hidden 256]

The same requests are generated in three ways, on engines with the same arguments: by `sglang.Engine.generate` with one
list, in a separate process; by `ProcessEngine` with one list; and by `ProcessEngine` with a work queue, as in a job.
Every sample has `--tokens` tokens. Prints medians over the rounds, after a warm-up round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore

from tools.bench.harness import options_of
from verl_mg.checkpoint.hf_safetensors import CheckpointReader, load_shards
from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.data.prompts import Prompt
from verl_mg.engines.engine import Request, Sample, Sampling
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.kinds import SGLANG
from verl_mg.engines.payloads import Staging
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.engines.sglang.arguments import engine_arguments, environment
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.rollout.engine_worker import EngineEvents, EngineWorker
from verl_mg.rollout.groups import Group
from verl_mg.rollout.work_queue import WorkQueue
from verl_mg.sharding.weight_table import weight_table

GROUP = 8
PROMPT = 32


def options() -> argparse.Namespace:
    parser = options_of(__doc__, requests=256, tokens=64, running=64, rounds=5, hidden=256)
    parser.add_argument("--direct", help=argparse.SUPPRESS)
    return parser.parse_args()


def settings_of(chosen: argparse.Namespace) -> EngineOptions:
    return EngineOptions(
        layout=EngineLayout(), dtype=torch.float32, max_running=chosen.running, max_positions=PROMPT + chosen.tokens + 8
    )


def requests_of(chosen: argparse.Namespace) -> list[Request]:
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 60, (chosen.requests // GROUP, PROMPT), generator=draw).tolist()
    return [Request(i, tuple(prompts[i // GROUP]), i) for i in range(chosen.requests)]


def direct(chosen: argparse.Namespace) -> None:
    """Runs a plain `sglang.Engine`: for each input line, prints a line with the seconds."""
    import sglang

    engine = sglang.Engine(**engine_arguments(Path(chosen.direct), settings_of(chosen)) | {"load_format": "auto"})
    prompts = [list(request.prompt) for request in requests_of(chosen)]
    sampling = {"max_new_tokens": chosen.tokens, "temperature": 1.0, "ignore_eos": True}
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        result: Any = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        seconds = time.perf_counter() - started
        assert sum(len(sample["output_ids"]) for sample in result) == chosen.requests * chosen.tokens
        print(json.dumps(seconds), flush=True)
    engine.shutdown()


def by_list(engine: ProcessEngine, requests: list[Request], sampling: Sampling, key: str) -> int:
    return sum(len(sample.tokens) for sample in engine.generate(requests, sampling))


def by_queue(engine: ProcessEngine, requests: list[Request], sampling: Sampling, key: str) -> int:
    store = HashStore()
    samples: list[Sample] = []
    prompt = Prompt(0, (), "", None, {})
    groups = [Group(prompt, range(start, start + GROUP)) for start in range(0, len(requests), GROUP)]
    queue = WorkQueue(store, key, sampling, groups, len(groups))
    worker = EngineWorker(engine, 1, EngineEvents(store), requests.__getitem__, samples.append, samples.append)
    worker.add(queue)
    worker.work_off(queue)
    return sum(len(sample.tokens) for sample in samples)


def load_weights(engine: ProcessEngine, model: Path) -> None:
    shards = weight_table(read_config(model)).engine_shards(EngineLayout(), 0)
    staging = Staging(shards, dict.fromkeys(shards, torch.float32), torch.device("cpu"))
    reader = CheckpointReader(ModelDirectory.find(model))
    load_shards(reader, shards, staging.tensors)
    engine.loaded(engine.load([staging.payload()], 0))


def main() -> None:
    chosen = options()
    if chosen.direct:
        direct(chosen)
        return
    folder = Path(tempfile.mkdtemp())
    model = make_tiny_model(folder / "model", "qwen3", hidden=chosen.hidden, layers=4, ffn=2 * chosen.hidden)
    command = [sys.executable, __file__, "--direct", str(model)]
    for name in ("requests", "tokens", "running", "hidden"):
        command += [f"--{name}", str(getattr(chosen, name))]
    log = (folder / "direct.log").open("wb")
    other = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=environment(folder, settings_of(chosen)),
    )
    assert other.stdin and other.stdout
    while (line := other.stdout.readline()) and line.strip() != '"ready"':
        pass
    engine = ProcessEngine(SGLANG, model, settings_of(chosen), folder / "engine.log")
    load_weights(engine, model)
    requests, sampling = requests_of(chosen), Sampling(max_new_tokens=chosen.tokens)
    seconds: dict[str, list[float]] = {"sglang.Engine.generate": [], "as one list": [], "from a work queue": []}
    for number in range(chosen.rounds + 1):
        other.stdin.write("go\n")
        other.stdin.flush()
        seconds["sglang.Engine.generate"].append(float(other.stdout.readline()))
        for name, way in (("as one list", by_list), ("from a work queue", by_queue)):
            started = time.perf_counter()
            assert way(engine, requests, sampling, str(number)) == chosen.requests * chosen.tokens
            seconds[name].append(time.perf_counter() - started)
    other.stdin.close()
    other.wait()
    engine.close()
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    base = medians["sglang.Engine.generate"]
    for name, median in medians.items():
        rate = chosen.requests * chosen.tokens / median
        print(f"{name:24} {median:7.3f} s {rate:8.0f} tokens/s {base / median:6.3f} of direct")


if __name__ == "__main__":
    main()
