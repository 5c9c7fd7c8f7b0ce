"""Shards sent straight to the ranks of real SGLang servers: weights, and bytes counted at both ends."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.roles.sglang_jobs import checked_answers, inputs, sglang_job, trained_once
from tests.sglang_servers import RunningServer, receiving_server
from tests.traces import needs_sglang
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.sharding.boxes import numel
from verl_mg.sharding.weight_table import weight_table

pytestmark = needs_sglang
KEYS = ("weight_sync/bytes_sent", "weight_sync/bytes_received", "weight_sync/bytes_lower_bound")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return inputs(tmp_path_factory.mktemp("shards"), "qwen3")


@pytest.fixture(scope="module")
def servers(folder) -> Iterator[list[RunningServer]]:
    running = [receiving_server(folder / "model", folder / f"server-{i}.log") for i in range(2)]
    try:
        yield [server.wait_until_ready() for server in running]
    finally:
        for server in running:
            server.kill()


def train(folder: Path, urls: list[str], overrides: list[str]) -> list[dict[str, object]]:
    job, recipe = sglang_job(folder, f"rollout.urls=[{','.join(urls)}]", *overrides)
    output = []
    for update in range(2):
        seen = trained_once(job, recipe, folder, f"checkpoint-{update}")
        output.append(seen | {"bytes": [job.rollout.metrics[key] for key in KEYS]})
    return output


def needed_bytes(model: Path, layout: EngineLayout) -> int:
    """Elements of the shards of a server's ranks, in float32, each once for each rank: they have nothing before."""
    table = weight_table(read_config(model))
    boxes = {
        (rank, piece.tensor, piece.source)
        for rank in range(layout.ranks)
        for shard in table.engine_shards(layout, rank).values()
        for piece in shard.pieces
    }
    return 4 * sum(numel(box) for _, _, box in boxes)


def test_shards_of_tp2_pp2_reach_two_servers_at_the_lower_bound(folder, servers, ranks):
    urls = [server.url for server in servers]
    results = ranks.run(4, train, folder, urls, ["actor.layout=tp2-pp2", "rollout.weight_transfer=shards"])
    for output in zip(*results, strict=True):
        assert len(checked_answers(folder, output)) == 5
        sent, received, lower_bound = output[0]["bytes"]
        assert sent == received == lower_bound == 2 * needed_bytes(folder / "model", EngineLayout(tp=2))
