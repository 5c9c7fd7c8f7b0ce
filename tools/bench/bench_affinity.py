"""Measures what it saves that a pool of servers sends all requests of a prompt to one server.

    python -m tools.bench.bench_affinity [--prompts 24] [--samples 8] [--prompt-tokens 200] [--tokens 32] [--servers 2]
        [--running 192] [--rounds 5] [--hidden 256] [--policy fcfs]

Real SGLang servers generate groups of samples in two turns, in the order of the prompts: a sample whose first turn is
complete continues, after an observation of 16 tokens, before further samples start. `ServerPool` chooses the
servers by the prompt; its subclass here only by load: the server with the most free slots. Both get the same requests,
in turn, on the same servers; before each run these load their weights again, which empties their prefix caches. With
fewer slots (`--running`, of each server) than requests a prompt's server is at times full, and its requests go to
another one. `--policy lpm` is SGLang's order by the longest prefix in the cache, in place of the order of arrival.

Prints medians over the rounds, after a warm-up round: the share of the prompt tokens, of both turns, that was found in
a prefix cache, the prompt tokens that were computed, the prompt tokens of the busiest server over their mean, and the
seconds. Every round has other prompts, since their hashes decide how evenly they are distributed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tools.bench.harness import options_of
from tools.bench.local_servers import running_servers
from verl_mg.engines.engine import CACHED, PROMPT, Request, Sample, Sampling
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.trajectory import NOT_GENERATED
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.servers.info import ServerRequirements
from verl_mg.servers.pool import ServerPool
from verl_mg.servers.remote_engine import RemoteEngine

OBSERVATION = 16


class PoolByLoad(ServerPool):
    """Pool that does not look at prompts."""

    def _place(self, request: Request, sampling: Sampling) -> None:
        _, client = max(self._local_ready(), key=lambda item: item[1].num_free_slots())
        client.submit([request], sampling)


@dataclass(frozen=True)
class Run:
    """Tokens and seconds of one run of the workload."""

    prompt: int
    """Prompt tokens of all requests."""
    cached: int
    """Prompt tokens that were found in a prefix cache."""
    busiest: float
    """Prompt tokens of the busiest server over the mean of all."""
    seconds: float
    """Seconds from the first request to the last sample."""


def main() -> None:
    """Prints the medians of both ways and their ratio."""
    parser = options_of(
        __doc__, prompts=24, samples=8, prompt_tokens=200, tokens=32, servers=2, running=192, rounds=5, hidden=256
    )
    parser.add_argument("--policy", default="fcfs", choices=("fcfs", "lpm"))
    chosen = parser.parse_args()
    longest = chosen.prompt_tokens + 2 * chosen.tokens + OBSERVATION
    settings = EngineOptions(
        layout=EngineLayout(), dtype=torch.float32, max_running=chosen.running, max_positions=longest + 8,
        extra={"skip_tokenizer_init": False, "schedule_policy": chosen.policy},
    )  # fmt: skip
    ways: dict[str, Callable[..., ServerPool]] = {"by prompt": ServerPool, "by load": PoolByLoad}
    runs: dict[str, list[Run]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as name:
        model = make_tiny_model(
            Path(name) / "model", "qwen3", hidden=chosen.hidden, layers=4, ffn=2 * chosen.hidden,
            max_positions=settings.max_positions,
        )  # fmt: skip
        requirements = ServerRequirements(read_config(model), longest)

        def connect(url: str, borrowed: bool, on_arrival: Callable[[], None]) -> RemoteEngine:
            return RemoteEngine(url, requirements, settings, borrowed=borrowed, on_arrival=on_arrival)

        with running_servers(model, settings, chosen.servers, Path(name)) as urls:
            for number in range(chosen.rounds + 1):
                for way, kind in ways.items():
                    runs[way].append(measure(kind(connect), urls, model, chosen, seed=number))
    _report({way: measured[1:] for way, measured in runs.items()})


def measure(pool: ServerPool, urls: Sequence[str], model: Path, chosen: argparse.Namespace, seed: int) -> Run:
    """Returns the measurements of one run on servers with an empty prefix cache."""
    pool.assign(dict(enumerate(urls)))
    for server in pool.due(time.monotonic()):
        pool.reach(server)
    receivers = pool.receivers()
    assert len(receivers) == len(urls)
    for client in receivers.values():
        client.load_folder(model, version=0)
    pool.confirm(receivers, 0)
    started = time.perf_counter()
    _generate(pool, chosen, seed)
    seconds = time.perf_counter() - started
    counts = [client.take_counts() for client in receivers.values()]
    pool.close()
    prompt, cached = ([part.get(name, 0) for part in counts] for name in (PROMPT, CACHED))
    return Run(sum(prompt), sum(cached), max(prompt) / statistics.mean(prompt), seconds)


def _generate(pool: ServerPool, chosen: argparse.Namespace, seed: int) -> None:
    """Generates both turns of all samples."""
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, 60, (chosen.prompts, chosen.prompt_tokens), generator=draw).tolist()
    observation = tuple(torch.randint(3, 60, (OBSERVATION,), generator=draw).tolist())
    total = chosen.prompts * chosen.samples
    requests = [Request(i, tuple(prompts[i // chosen.samples]), i) for i in range(total)]
    first = Sampling(max_new_tokens=chosen.tokens)
    second = Sampling(max_new_tokens=2 * chosen.tokens + OBSERVATION)  # of both turns together
    waiting, complete = deque(requests), 0
    while complete < total:
        while waiting and pool.num_free_slots() > 0:
            pool.submit([waiting.popleft()], first)
        for sample in pool.collect(timeout=1.0):
            assert sample.finish == "length"
            if len(sample.tokens) > chosen.tokens:
                complete += 1
            else:
                pool.submit([replace(requests[sample.id], partial=_observed(sample, observation))], second)


def _observed(sample: Sample, observation: tuple[int, ...]) -> Sample:
    """Returns a sample followed by an observation."""
    count = len(observation)
    return sample.extended_by(Sample(sample.id, observation, (0.0,) * count, (NOT_GENERATED,) * count, "stop"))


def _report(runs: dict[str, list[Run]]) -> None:
    seconds = {way: statistics.median(run.seconds for run in measured) for way, measured in runs.items()}
    computed = {way: statistics.median(run.prompt - run.cached for run in measured) for way, measured in runs.items()}
    for way, measured in runs.items():
        share = statistics.median(run.cached / run.prompt for run in measured)
        busiest = statistics.median(run.busiest for run in measured)
        least, most = min(run.seconds for run in measured), max(run.seconds for run in measured)
        print(
            f"{way:10} {share:6.1%} of {measured[0].prompt} prompt tokens in the cache, {computed[way]:7.0f} computed, "
            f"busiest server {busiest:.2f} of the mean, {seconds[way]:6.2f} s ({least:.2f} to {most:.2f})"
        )
    ratios = [values["by prompt"] / values["by load"] for values in (computed, seconds)]
    print("by prompt / by load: {:.2f} computed, {:.2f} seconds".format(*ratios))


if __name__ == "__main__":
    main()
