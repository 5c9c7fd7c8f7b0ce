"""Asynchronous rollouts on real servers outside the job: weights reach requests in flight, over both ways."""

from pathlib import Path

import pytest
import torch

from tests.helpers.sglang_servers import RunningServer, receiving_server
from tests.helpers.traces import needs_sglang
from tests.rollout.engine_jobs import engine_job, inputs, token_logprobs
from verl_mg.run.loop import one_iteration

pytestmark = [needs_sglang, pytest.mark.nightly]
ITERATIONS = 5


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
    running = [receiving_server(folder / "model", folder / "0.log", "tp1", **options)]
    running.append(RunningServer(folder / "model", folder / "1.log", "tp1", **options))
    try:
        urls = [server.wait_until_ready().url for server in running]
        rows = [row for rank in ranks.run(2, train, folder, urls, keep_cache) for row in rank]
    finally:
        for server in running:
            server.kill()
    assert len({row["id"] for row in rows}) == len(rows) == ITERATIONS * 6
    spans = set()
    for row in rows:
        versions = row["policy_versions"]
        written = versions[versions >= 0].unique().tolist()
        spans.add(len(written))
        if keep_cache:
            continue  # keys and values of older weights are part of the context
        for version in written:
            expected = token_logprobs(folder / f"weights-{version}", row["tokens"])
            of_version = (versions == version)[1:]
            torch.testing.assert_close(row["rollout_logprobs"][1:][of_version], expected[of_version], atol=1e-4, rtol=0)
    assert max(spans) >= 2, "no sample was in flight in an update"
