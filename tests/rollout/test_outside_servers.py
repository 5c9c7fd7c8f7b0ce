"""Real servers outside a job: shards at the lower bound of bytes; one joins, one is removed, one is killed."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.rank_pool import job_store
from tests.helpers.sglang_servers import RunningServer, ready, receiving_server
from tests.helpers.traces import needs_sglang
from tests.rollout.engine_jobs import checked_answers, complaint, engine_job, inputs, train
from verl_mg.engines.engine import CAPACITY, OBSERVED, RUNNING, USED, WAITING, Request, Sampling
from verl_mg.engines.sglang.host import load_counts
from verl_mg.http_client import JsonSession
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.servers.info import ServerKeys
from verl_mg.servers.pool import ServerPool
from verl_mg.servers.pool_member import State
from verl_mg.servers.remote_engine import LOADS, RemoteEngine
from verl_mg.sharding.boxes import numel
from verl_mg.sharding.weight_table import weight_table

pytestmark = needs_sglang
WAIT_SECONDS = 600.0
FEW, MANY = 6, 1000
"""Samples of a rank before and after the disturbance of a rollout, which has 36."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return inputs(tmp_path_factory.mktemp("membership"), "qwen3")


KEYS = {"TEST_SERVER_KEY": "key-of-users", "TEST_ADMIN_KEY": "key-of-administrators"}

OF_KEYS = ("rollout.api_key_env=TEST_SERVER_KEY", "rollout.admin_key_env=TEST_ADMIN_KEY")


@pytest.fixture(scope="module")
def servers(folder) -> Iterator[list[RunningServer]]:
    """Two servers of two ranks that receive shards; the third one has one rank, and gets its weights by broadcast."""
    model, keys = folder / "model", {"api_key": KEYS["TEST_SERVER_KEY"], "admin_api_key": KEYS["TEST_ADMIN_KEY"]}
    running = [receiving_server(model, folder / f"server-{i}.log", "tp2", **keys) for i in range(2)]
    running.append(RunningServer(model, folder / "server-2.log", "tp1", **keys))
    with ready(*running) as servers:
        yield servers


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def with_keys(work: Callable[..., object], *arguments: object) -> object:
    with pytest.MonkeyPatch.context() as patch:
        for name, key in KEYS.items():
            patch.setenv(name, key)
        return work(*arguments)


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


def train_on(servers: list[RunningServer], ranks, folder: Path, *overrides: str) -> zip:
    """What the ranks report of each iteration on the first two servers."""
    urls = ",".join(server.url for server in servers[:2])
    settings = (f"rollout.urls=[{urls}]", "actor.layout=tp2-pp2", "rollout.weight_transfer=shards", *OF_KEYS)
    return zip(*ranks.run(4, with_keys, train, folder, *settings, *overrides), strict=True)


def test_shards_of_tp2_pp2_reach_two_servers_at_the_lower_bound(folder, servers, ranks):
    for output in train_on(servers, ranks, folder):
        assert len(checked_answers(folder, output)) == 5
        sent, received, lower_bound = output[0]["bytes"]
        assert sent == received == lower_bound == 2 * needed_bytes(folder / "model", EngineLayout(tp=2))


def test_load_of_a_server_is_counted(servers):
    session = JsonSession(servers[2].url, ServerKeys(KEYS["TEST_SERVER_KEY"], KEYS["TEST_ADMIN_KEY"]).headers)
    reply = session.start(session.get(LOADS, WAIT_SECONDS)).result()
    session.close()
    counts = load_counts(reply["loads"])
    assert counts[CAPACITY] > 0 and counts[OBSERVED] == 1 and {RUNNING, WAITING, USED} <= counts.keys()


@pytest.mark.nightly
def test_job_that_sends_changes_alone_generates_with_the_exported_weights(folder, servers, ranks):
    shares = []
    for output in train_on(servers, ranks, folder, "rollout.delta=true", "actor.optimizer.lr=1e-9"):
        assert len(checked_answers(folder, output)) == 5
        sent, received, everything = output[0]["bytes"]
        assert sent == received
        shares.append(received / everything)
    assert max(shares) < 0.9  # of the sync after an update; the first one of the job had all values


@pytest.mark.nightly
def test_job_that_shares_changes_in_a_folder_generates_with_the_exported_weights(folder, servers, ranks, tmp_path):
    in_folder = ("rollout.weight_transfer=disk", f"rollout.shared_folder={tmp_path}")
    for output in train_on(servers, ranks, folder, *in_folder, "rollout.delta=true", "actor.optimizer.lr=1e-9"):
        assert len(checked_answers(folder, output)) == 5
        _, received, everything = output[0]["bytes"]
        assert everything == 2 * needed_bytes(folder / "model", EngineLayout(tp=2)) and 0 < received < 0.9 * everything
    assert [path.name for path in tmp_path.iterdir()] == ["changes-2"]


class Ration:
    """How many samples a pool may still take: the others wait until what shall happen to its servers has happened."""

    def __init__(self, pool: ServerPool, patch: pytest.MonkeyPatch) -> None:
        self.left = 0
        free, submit = pool.num_free_slots, pool.submit

        def submit_counted(requests: Sequence[Request], sampling: Sampling) -> None:
            self.left -= len(requests)
            submit(requests, sampling)

        patch.setattr(pool, "num_free_slots", lambda: min(free(), self.left))
        patch.setattr(pool, "num_queue_slots", lambda: 0)
        patch.setattr(pool, "submit", submit_counted)


def come_and_go(folder: Path, urls: list[str], processes: list[int]) -> dict[str, object]:
    """Servers 0 and 1 at first; 2 joins and 0 is removed in the first rollout, 1 is killed in the second one."""
    rank, store, file = dist.get_rank(), job_store(), folder / "servers.txt"
    file.write_text(f"{urls[0]}\n\n# a comment\n{urls[1]}/\n")
    dist.barrier()
    job, recipe = engine_job(
        folder, f"rollout.urls_file={file}", "actor.layout=tp2", "rollout.max_running_requests=1",
        "rollout.max_new_tokens=16", "algorithm.group_size=6", *OF_KEYS,
    )  # fmt: skip
    pool = job.rollout._engines.engine
    served: list[set[int]] = [set(), set()]  # numbers of the servers that this rank sent samples to, for each rollout
    rollouts = iter(served)

    def join_and_remove() -> None:
        wait_until(lambda: 0 in now)
        file.write_text("\n".join(urls))
        wait_until(lambda: 2 in pool.views(State.READY))
        ration.left += FEW
        wait_until(lambda: 2 in now)
        file.write_text("\n".join(urls[1:]))
        wait_until(lambda: 0 not in pool.views(State.READY))
        store.set("removed", "")

    def disturbed(disturbance: Callable[[], None], event: str) -> None:
        disturbance()
        wait_until(lambda: store.check([event]))
        ration.left = MANY

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as threads:
        submit = RemoteEngine.submit

        def submit_noted(self: RemoteEngine, requests: Sequence[Request], sampling: Sampling) -> None:
            number = urls.index(self.url)
            submit(self, requests, sampling)
            now.add(number)
            if number == 1 and now is served[1] and not store.check(["killed"]):
                os.killpg(processes[1], signal.SIGKILL)
                store.set("killed", "")

        patch.setattr(RemoteEngine, "submit", submit_noted)
        ration = Ration(pool, patch)
        now, ration.left = next(rollouts), FEW
        end = threads.submit(disturbed, join_and_remove if rank == 0 else lambda: None, "removed")
        recipe.iteration(job, job.config.algorithm)
        end.result()
        servers = job.rollout.metrics["rollout/servers"]
        now, ration.left = next(rollouts), FEW
        end = threads.submit(disturbed, lambda: None, "killed")
        job.rollout.generate(list(job.prompts)[:6], num_samples=6)
        end.result()
    job.rollout.update_weights(job.actor)
    batches, metrics = job.rollout.train_batches, job.rollout.metrics
    job.rollout.close()
    return {
        "served": served,
        "servers": [servers, metrics["rollout/servers"]],
        "lost": metrics["rollout/lost_servers"],
        "cache_hits": metrics["time/prompt_cache_hits"],
        "ids": [batch["sample_id"].tolist() for batch in batches],
        "versions": [batch["policy_versions"][batch["loss_mask"]].unique().tolist() for batch in batches],
        "ended": [
            bool((batch["truncated"] | (batch["tokens"][batch.lengths.cumsum(0) - 1] == 1)).all()) for batch in batches
        ],
    }


def test_servers_that_come_and_go_lose_no_sample(folder, servers, ranks):
    urls, processes = [server.url for server in servers], [server.pid for server in servers]
    results = ranks.run(2, with_keys, come_and_go, folder, urls, processes)
    for call, expected in enumerate([range(36), range(36, 72)]):
        assert sorted(i for rank in results for i in rank["ids"][call]) == list(expected)
        assert {v for rank in results for v in rank["versions"][call]} == {call}
        assert all(rank["ended"][call] for rank in results)
    for rank in results:
        assert (rank["servers"], rank["lost"]) == ([2, 1], 1)
        assert 0 < rank["cache_hits"] < 1  # six samples of each prompt
    # Server 2 joined in the first rollout, and in the second one took over the samples of server 1, which was killed.
    assert [rank["served"] for rank in results] == [[{0, 2}, {2}], [{1}, {1, 2}]]


def test_server_with_a_key_refuses_a_job_without(folder, servers, ranks):
    (output,) = ranks.run(1, complaint, folder, f"rollout.urls=[{servers[2].url}]")
    assert output.startswith(f"{servers[2].url}: refuses the job's key (/server_info: Unauthorized). Write the name of")
