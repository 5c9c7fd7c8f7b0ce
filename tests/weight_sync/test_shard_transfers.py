"""Shards of more models and layouts sent to real servers, and servers that are killed in the middle of a transfer."""

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.sglang_servers import RunningServer, ready, receiving_server
from tests.helpers.traces import needs_sglang
from tests.rollout.engine_jobs import checked_answers, engine_job, inputs, trained_once
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.reshard import execute
from verl_mg.weight_sync import transfer_plan

pytestmark = [needs_sglang, pytest.mark.nightly]
SIZES = {"hidden": 32, "heads": 4, "ffn": 128, "init_std": 0.2, "perturb": True, "seed": 3, "max_positions": 64}


def folder_of(folder: Path, architecture: str, **sizes: object) -> Path:
    inputs(folder, "qwen3")
    if architecture != "qwen3" or sizes:
        make_tiny_model(folder / "model", architecture, characters="0123456789+-*=() abcdefg", **SIZES | sizes)
    return folder


def train(folder: Path, urls: list[str], layout: str) -> list[dict[str, object]]:
    job, recipe = engine_job(
        folder,
        f"rollout.urls=[{','.join(urls)}]",
        f"actor.layout={layout}",
        "rollout.weight_transfer=shards",
        "algorithm.prompts_per_iteration=8",
    )
    output = []
    for update in range(3):
        seen = trained_once(job, recipe, folder, f"checkpoint-{update}")
        keys = ("bytes_sent", "bytes_received", "bytes_lower_bound")
        output.append(seen | {"bytes": [job.rollout.metrics[f"weight_sync/{key}"] for key in keys]})
    job.rollout.close()
    return output


@pytest.mark.parametrize(
    ("architecture", "sizes", "layout", "num_ranks", "servers"),
    [
        ("qwen3", {"kv_heads": 4}, "tp4-pp2", 8, ["tp2", "tp2"]),
        ("qwen3_moe", {"kv_heads": 2}, "tp2-ep2-etp1", 4, ["tp2", "tp1"]),
    ],
    ids=["tp4-pp2 to two tp2", "experts to tp2 and tp1"],
)
def test_shards_reach_servers_at_the_lower_bound(architecture, sizes, layout, num_ranks, servers, ranks, tmp_path):
    folder = folder_of(tmp_path, architecture, **sizes)
    with ready(
        *(receiving_server(folder / "model", folder / f"{i}.log", text) for i, text in enumerate(servers))
    ) as servers:
        results = ranks.run(num_ranks, train, folder, [server.url for server in servers], layout)
    before = None
    for output in zip(*results, strict=True):
        answers = checked_answers(folder, output)
        assert len(answers) == 5 and answers != before
        before = answers
        sent, received, lower_bound = output[0]["bytes"]
        print(f"{architecture} {layout} to {servers}: {received:,.0f} bytes received, lower bound {lower_bound:,.0f}")
        assert sent == received == lower_bound > 0


def kill_in_transfer(folder: Path, urls: list[str], process: int) -> dict[str, object]:
    """The first server is killed when the last rank has sent its first chunk; the second one serves alone."""
    rank = dist.get_rank()

    def killing(*arguments):
        if rank == dist.get_world_size() - 1 and not killed:
            os.killpg(process, signal.SIGKILL)
        killed.append(rank)
        return execute(*arguments)

    killed: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer_plan, "CHUNK_BYTES", 2**14)
        job, recipe = engine_job(
            folder, f"rollout.urls=[{','.join(urls)}]", "actor.layout=tp2", "rollout.weight_transfer=shards"
        )
        trained_once(job, recipe, folder, "before")
        patch.setattr(transfer_plan, "execute", killing)
        seen = trained_once(job, recipe, folder, "after")
    metrics = job.rollout.metrics
    job.rollout.close()
    return seen | {
        "servers": metrics["rollout/servers"],
        "lost": metrics["rollout/lost_servers"],
        "killed": len(killed),
    }


def test_server_killed_in_a_transfer_is_left_out(ranks, tmp_path):
    folder = folder_of(tmp_path, "qwen3")
    running = [receiving_server(folder / "model", folder / f"{i}.log", "tp2") for i in range(2)]
    with ready(*running) as servers:
        output = ranks.run(2, kill_in_transfer, folder, [server.url for server in servers], running[0].pid)
    assert len(checked_answers(folder, output)) == 5
    assert all((rank["servers"], rank["lost"]) == (1, 1) and rank["killed"] > 1 for rank in output)
    assert sorted(i for rank in output for i in rank["ids"]) == list(range(24, 48))


def test_shards_and_a_broadcast_serve_the_exported_checkpoint(ranks, tmp_path):
    folder = folder_of(tmp_path, "qwen3")
    receiving = receiving_server(folder / "model", folder / "0.log", "tp2")
    with ready(receiving, RunningServer(folder / "model", folder / "1.log", "tp1")) as servers:
        results = ranks.run(2, train_by_both_ways, folder, [server.url for server in servers])
    for output in zip(*results, strict=True):
        assert len(checked_answers(folder, output)) == 5


def train_by_both_ways(folder: Path, urls: list[str]) -> list[dict[str, object]]:
    job, recipe = engine_job(folder, f"rollout.urls=[{','.join(urls)}]", "actor.layout=pp2")
    output = [trained_once(job, recipe, folder, f"checkpoint-{update}") for update in range(2)]
    job.rollout.close()
    return output
