"""Moves weights, trains and runs a job under layouts that cross nodes; under the launcher on each node.

    python -m verl_mg.launch --nnodes 2 ... -m tests.gpu.nodes outcomes.jsonl

Rank 0 writes a line for each case. Nodes need no folder in common. A case in which a rank raises ends the program.
"""

import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist

from tests.helpers.random_models import config
from tests.helpers.tiny_jobs import RECIPES, files_of, logged, write_sums
from tests.helpers.tiny_models import oracle, random_rows
from tests.megatron.layout_models import HALF_HEAD_DIM, make_model
from tests.megatron.training import assert_equal, train, train_in_plain_torch
from tests.reshard.moves import move
from verl_mg import device
from verl_mg.config import load_config
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.distributed.world import World
from verl_mg.job.recipe import load_recipe
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.models.hf_config import read_config
from verl_mg.run.loop import train as run_job
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.sharding.weight_table import weight_table

ROWS, BUCKET = 12, 4000
Case = Callable[[], list[str]]  # A function that returns what is wrong on this rank


def main() -> int:
    """Returns the exit code, the same on all ranks: 1 if a case failed."""
    failed, file = False, Path(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        # Before ranks join: among several, `transformers` saves on one alone.
        for name in ("dense", "mixture"):
            make_model(Path(folder) / name, name, head_dim=HALF_HEAD_DIM)
        write_sums(Path(folder))
        world = World.join()
        for name, case in cases(Path(folder), world).items():
            started = time.monotonic()
            write(file, name, "did not end", 0.0)
            try:
                wrong = case()
            except Exception as error:
                write(file, name, "failed", time.monotonic() - started, f"rank {world.rank}: {error}", world.rank)
                world.abort(error)
            everywhere = [problem for problems in all_gather_json(wrong) for problem in problems]
            failed |= bool(everywhere)
            write(file, name, "failed" if everywhere else "passed", time.monotonic() - started, "; ".join(everywhere))
    world.shut_down()
    return int(failed)


def cases(folder: Path, world: World) -> dict[str, Case]:
    """Names of what is checked, with how."""
    ranks, node = world.size, device.ranks_of_a_node(world.size)
    nodes = ranks // node
    inside = next(size for size in (4, 2, 1) if node % size == 0)  # of a tensor-parallel group in a node
    table = weight_table(config("qwen3_moe"))

    def megatron(layout: str) -> ShardMap:
        return table.shard_map_megatron(Placement.on(Layout.parse(layout), ranks))

    engines = table.shard_map_engine(EnginePlacement(EngineLayout(tp=inside), tuple(range(ranks)), 1))
    first, last = (table.shard_map_replicated(range(start, start + node)) for start in (0, ranks - node))
    moves = {
        f"tp{inside}-pp{nodes} to engines tp{inside}": (megatron(f"tp{inside}-pp{nodes}"), engines),
        f"ep{nodes} to engines tp{inside}": (megatron(f"tp1-ep{nodes}"), engines),
        f"pp{nodes} to ep{nodes}": (megatron(f"pp{nodes}"), megatron(f"ep{nodes}")),
        "first node to last node": (first, last),
    }
    found: dict[str, Case] = {
        f"weights from {name}": partial(move, config("qwen3_moe"), *sides, node, BUCKET)
        for name, sides in moves.items()
    }
    for model, layout in (("dense", f"pp{nodes}"), ("dense", f"cp{nodes}"), ("mixture", f"tp1-ep{nodes}")):
        found[f"training of {model} model under {layout}"] = partial(train_under, folder, model, layout)
    return found | {"SFT job": partial(sft_job, folder, world, nodes)}


def train_under(folder: Path, name: str, layout: str) -> list[str]:
    """Two steps; rank 0 compares all ranks with `transformers`."""
    model = folder / name
    rows = random_rows(ROWS, read_config(model).vocab)
    results = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(train(model, layout, rows), results)
    if results is None:
        return []
    try:
        assert_equal(results, train_in_plain_torch(oracle(model), rows, folder / "oracle"), 1e-4)
    except AssertionError as error:
        return [str(error) or str(traceback.extract_tb(error.__traceback__)[-1].line)]
    return []


def sft_job(folder: Path, world: World, nodes: int) -> list[str]:
    """A short job whose stages are on different nodes lowers its loss."""
    settings = [
        *(*files_of(folder, folder / "run"), f"model.path={folder / 'dense'}", "model.dtype=bfloat16"),
        *("job.iterations=12", "checkpoint.every=0", "job.save=false", f"actor.layout=pp{nodes}"),
        *("algorithm.examples_per_iteration=16", "actor.optimizer.lr=1e-2"),
    ]
    recipe = load_recipe(RECIPES / "sft.py")
    run_job(recipe, load_config(None, settings, recipe.config), world)
    if world.rank > 0:
        return []
    losses = [line["actor/loss"] for line in logged(folder / "run") if "actor/loss" in line]
    return [] if losses[-1] < 0.7 * losses[0] else [f"losses {losses}"]


def write(file: Path, name: str, outcome: str, seconds: float, reason: str = "", rank: int | None = None) -> None:
    """Appends a line, on rank 0 or on the rank given."""
    if dist.get_rank() == (rank or 0):
        line = {"name": name, "outcome": outcome, "seconds": seconds, "reason": reason.partition("\n")[0]}
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
