"""Asynchronous rollouts on real servers outside the job: weights reach requests in flight, over both ways."""

from pathlib import Path

import pytest
import torch

from tests.helpers.sglang_servers import RunningServer, ready, receiving_server
from tests.helpers.traces import needs_sglang
from tests.rollout.engine_jobs import check_versions, engine_job, inputs
from verl_mg.run.loop import one_iteration

pytestmark = [needs_sglang, pytest.mark.nightly]
ITERATIONS = 5
KINDS = (receiving_server, RunningServer)
"""Servers that receive shards, and whole weights."""


def train(folder: Path, urls: list[str], keep_cache: bool) -> list[dict[str, list[torch.Tensor]]]:
    """This rank's samples; the weights are written after each update."""
    job, recipe = engine_job(
        folder, "rollout.mode=async", "rollout.max_staleness=2", "actor.layout=tp2", f"rollout.urls=[{','.join(urls)}]",
        "algorithm.prompts_per_iteration=3", "algorithm.group_size=2", f"job.iterations={ITERATIONS}",
        "rollout.max_new_tokens=400", f"rollout.keep_kv_cache={str(keep_cache).lower()}",
    )  # fmt: skip
    job.actor.save(folder / "weights-0", folder / "model")
    rows = []
    for iteration in range(1, ITERATIONS + 1):
        one_iteration(recipe, job, iteration)
        job.actor.save(folder / f"weights-{job.actor.num_updates}", folder / "model")
        (batch,) = job.rollout.train_batches
        names = ("tokens", "rollout_logprobs", "policy_versions")
        for i in range(len(batch)):
            rows.append({name: batch.row(name, i) for name in names} | {"id": int(batch["sample_id"][i])})
    job.close()
    return rows


@pytest.mark.parametrize("keep_cache", [False, True])
def test_async_rollout_on_servers_has_tokens_of_their_versions(ranks, tmp_path, keep_cache):
    folder = inputs(tmp_path, "qwen3", positions=512, unused=1000)
    options = {"max_total_tokens": 16384}
    running = [make(folder / "model", folder / f"{i}.log", "tp1", **options) for i, make in enumerate(KINDS)]
    with ready(*running) as servers:
        results = ranks.run(2, train, folder, [server.url for server in servers], keep_cache)
    rows = [row for rank in results for row in rank]
    assert len({row["id"] for row in rows}) == len(rows) == ITERATIONS * 6
    spans = set()
    for row in rows:
        spans.add(len(row["policy_versions"].unique()) - 1)  # -1 in the prompt
        if not keep_cache:  # else keys and values of older weights are part of the context
            check_versions(folder, row)
    assert max(spans) >= 2, "no sample was in flight in an update"
