"""Measures a weight sync that starts while the weights of later layers are still gathered, against one that waits.

    python -m tools.bench.bench_sync_overlap [--layers 16] [--hidden 512] [--repeats 7]

Four ranks over gloo with one thread each. The actor is tp2 (two data-parallel ranks, each of which updates half of the
weights), the engine tp4. After an optimizer step the gathers of all buckets are in flight. The two ways take turns:

    after     the sync begins when all weights are complete
    overlap   it waits for the bucket of each weight before it sends that weight

The bytes received are the same, and the weights of the engine are compared bitwise.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import verl_mg.megatron  # noqa: F401
from verl_mg.config import MegatronConfig, OptimizerConfig
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.megatron.model_runner import MegatronRunner
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.megatron.trainer import MegatronTrainer
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.reshard import execute, plan, schedule
from verl_mg.training.model_spec import ModelSpec

RANKS = 4
BUCKET = 2_000_000
"""Elements of a bucket of weights."""
OVERLAP = MegatronConfig(ddp={"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": BUCKET})


def main() -> None:
    """Prints the median seconds of both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 16, "hidden": 512, "repeats": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        width = options.hidden
        sizes = {"layers": options.layers, "hidden": width, "heads": width // 64, "kv_heads": width // 64}
        make_tiny_model(Path(folder) / "model", "qwen3", head_dim=64, ffn=4 * width, **sizes)
        multiprocessing.spawn(_rank, (folder, options.repeats), nprocs=RANKS)


def _rank(rank: int, folder: str, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    groups = ParallelGroups(Placement.on(Layout.parse("tp2"), RANKS))
    runner = MegatronRunner(ModelSpec(Path(folder) / "model", torch.float32, megatron=OVERLAP), groups)
    trainer = MegatronTrainer(runner, OptimizerConfig(lr=1e-3, clip_grad=0.0))
    whole = runner.table.shard_map_engine(EnginePlacement(EngineLayout.parse("tp4"), tuple(range(RANKS))))
    moves = schedule(plan(runner.shard_map(), whole, RANKS), rank, runner.dtype)
    engine = {name: torch.zeros(shard.shape) for name, shard in whole.shards(rank).items()}
    seconds: dict[str, list[float]] = {"after": [], "overlap": []}
    received = set()
    for number in range(2 * (repeats + 1)):
        way = ("after", "overlap")[number % 2]
        for model in runner.model_chunks:
            for buffer in model.buffers:  # type: ignore[union-attr]
                buffer.grad_data.normal_()  # type: ignore[operator]
        dist.barrier()
        trainer._apply("step")
        started = time.perf_counter()
        if way == "after":
            runner.gathers.wait_for_all()
        parameters = runner.parameters(complete=False)
        traffic = execute(
            moves, parameters, engine, wait_for=lambda name, values=parameters: runner.wait_for([values[name]])
        )
        received.add(traffic.bytes_received)
        dist.barrier()
        seconds[way].append(time.perf_counter() - started)
        synced = {name: values.clone() for name, values in engine.items()}
        execute(moves, runner.parameters(), engine)
        assert all(torch.equal(synced[name], values) for name, values in engine.items())
    assert len(received) == 1
    if rank == 0:
        size = sum(values.nbytes for values in runner.parameters().values()) / 2**20
        print(f"{size:.0f} MiB of weights a rank in {len(runner.gathers._groups)} buckets")
        for way, times in seconds.items():
            print(f"{way:8} {statistics.median(times[1:]):.3f} s   of {', '.join(f'{t:.3f}' for t in times[1:])}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
