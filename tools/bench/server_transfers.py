"""Case `servers` of bench_reshard.py: real SGLang servers outside the job, shards against broadcast, in turn.

Ranks of a job over gloo have a model in float32; two servers of tp2 on this machine receive its weights. Every transfer
is a whole `update_weights`: requests over HTTP, the transfer itself, and SGLang's own work after it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tools.bench.local_servers import free_port, running_servers
from verl_mg.config import load_config
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.sglang.shard_receiver import RECEIVER
from verl_mg.job.job import RunningJob
from verl_mg.job.recipe import load_recipe
from verl_mg.layout import EngineLayout
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.rollout.rollout import Rollout
from verl_mg.weight_sync.shards import ProcessGroupSync

RANKS, ACTOR, SERVERS = 8, "tp4-pp2", 2
HIDDEN, PARAMETERS_OF_A_LAYER = 512, 4.2e6
SETTINGS = EngineOptions(
    layout=EngineLayout(tp=2), dtype=torch.float32, max_running=8, max_positions=128,
    extra={"skip_tokenizer_init": False, "custom_weight_loader": [RECEIVER]},
)  # fmt: skip
RECIPES = Path(__file__).parents[2] / "recipes"


def measure(parameters: int, repeats: int) -> dict[str, Any]:
    """Returns the bytes and the seconds of each way."""
    torch.set_num_threads(1)  # ranks are forked, which threads do not survive
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        layers = max(2, round(parameters / PARAMETERS_OF_A_LAYER / 2) * 2)
        make_tiny_model(
            folder / "model", "qwen3", characters="0123456789+-*=() abcdefg", hidden=HIDDEN, layers=layers, heads=8,
            kv_heads=4, ffn=4 * HIDDEN, max_positions=128,
        )  # fmt: skip
        (folder / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
        (folder / "reward.py").write_text("def zero(sample): return 0.0\n")
        with running_servers(folder / "model", SETTINGS, SERVERS, folder) as urls:
            results = multiprocessing.get_context("fork").SimpleQueue()
            arguments = (folder, urls, free_port(), repeats, results)
            multiprocessing.start_processes(_rank, arguments, nprocs=RANKS, start_method="fork")
            report: dict[str, Any] = results.get()
    return report


def lines(report: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of a report as a table."""
    ours = report["shards"]
    for way in ("shards", "broadcast"):
        received, seconds = report[way]["received"], report[way]["seconds"]
        ratios = f"{received / ours['received']:.2f}x bytes, {seconds / ours['seconds']:.2f}x time"
        yield (
            f"{'servers':<15} {way:<9} {received / 2**20:.1f} MiB received by all ranks of servers, at least "
            f"{ours['lower_bound'] / 2**20:.1f}; median {seconds:.3f} s; against shards {ratios}"
        )
    yield f"{'':<15} {report['parameters'] / 1e6:.0f}M parameters, Megatron {ACTOR} -> {SERVERS} servers of tp2"


def _rank(rank: int, folder: Path, urls: Sequence[str], port: int, repeats: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0)
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=RANKS)
    recipe = load_recipe(RECIPES / "grpo.py")
    overrides = [
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'prompts.jsonl'}",
        f"reward.function={folder / 'reward.py'}:zero",
        f"job.output={folder / 'run'}",
        f"actor.layout={ACTOR}",
        "rollout.engine=sglang",
        "rollout.max_new_tokens=8",
        f"rollout.urls=[{','.join(urls)}]",
    ]
    config = load_config(None, overrides, recipe.config)
    job = RunningJob(config, recipe.roles(config.algorithm), store)
    job.start()
    assert isinstance(job.rollout, Rollout)
    group: Any = job.rollout._engines
    table = job.actor.runner.table
    ways = {"shards": ProcessGroupSync(table), "broadcast": ProcessGroupSync(table, broadcast_to_all=True)}
    measured: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(repeats + 1):
        for way, sync in ways.items():
            group._sync = sync
            measured[way].append(group.update_weights(job.actor))
    job.rollout.close()
    if rank == 0:
        size = sum(torch.Size(shard.shape).numel() for shard in table.huggingface().values())
        results.put({"parameters": size} | {way: _summary(runs[1:]) for way, runs in measured.items()})
    dist.barrier()
    dist.destroy_process_group()


def _summary(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    seconds = sorted(run["time/weight_sync"] for run in runs)
    return {
        "received": runs[-1]["weight_sync/bytes_received"],
        "lower_bound": runs[-1]["weight_sync/bytes_lower_bound"],
        "seconds": seconds[len(seconds) // 2],
    }
