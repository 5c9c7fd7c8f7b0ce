"""Asynchronous rollouts on real engines and servers: tokens of each version, evaluations meanwhile, killed engines."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.engines import SGLANG
from tests.helpers.sglang_servers import RunningServer, ready, receiving_server
from tests.helpers.traces import needs_sglang, needs_vllm
from tests.rollout.engine_jobs import check_versions, engine_job, inputs
from verl_mg.engines.engine import RolloutEngine, Sample
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.rollout.groups import FIRST_EVALUATION_ID
from verl_mg.run.loop import one_iteration

ITERATIONS, PROMPTS, GROUP = 6, 1, 2
MAX_STALENESS = 4
EVALUATED = (4, 5)
"""Iterations after which an evaluation runs. Engines work ahead during one, so those before show samples in flight."""
ASYNC = [
    "rollout.mode=async",
    f"rollout.max_staleness={MAX_STALENESS}",
    "actor.layout=tp2",
    "rollout.num_ranks=1",
    "rollout.max_mismatch=0.001",
    f"algorithm.prompts_per_iteration={PROMPTS}",
    f"algorithm.group_size={GROUP}",
    f"job.iterations={ITERATIONS}",
]

SLOW = ["rollout.max_running_requests=1"]
"""One sample at a time: training waits for the engine, which is busy in every update."""


def rows_of(batch):
    names = ("tokens", "rollout_logprobs", "policy_versions", "loss_mask")
    return [{name: batch.row(name, i) for name in names} for i in range(len(batch))]


def train(folder: Path, overrides: list[str], engine: str, engine_fault: str) -> list[dict[str, object]]:
    """This rank's part of each iteration; weights are written after each, and evaluations run after two of them."""
    job, recipe = engine_job(folder, *ASYNC, *overrides, engine=engine)
    job.actor.save(folder / "weights-0", folder / "model")
    reported, real = [], job.rollout._engines.engine
    started, results = requests_and_results(real) if real is not None else ([], [])
    if engine_fault == "late" and real is not None:
        hold_back(real, 0, lambda: job.actor.num_updates >= 2)
    for iteration in range(1, ITERATIONS + 1):
        metrics = one_iteration(recipe, job, iteration) | job.rollout.metrics
        job.actor.save(folder / f"weights-{job.actor.num_updates}", folder / "model")
        (batch,) = job.rollout.train_batches
        evaluated, in_flight = None, []
        if iteration in EVALUATED:
            if iteration == EVALUATED[-1] and engine_fault == "kill" and real is not None:
                os.killpg(real.pid, signal.SIGKILL)
            in_flight, before = list(real._running) if real is not None else [], len(started)
            evaluated = job.rollout.generate_for_eval(list(job.prompts)[:2], 2, temperature=0.7)
            in_flight += started[before:]
        reported.append(
            {
                "ids": batch["sample_id"].tolist(),
                "prompts": batch["prompt_id"].tolist(),
                "rows": rows_of(batch),
                "version": job.actor.num_updates - 1,
                "metrics": metrics,
                "in_flight": [rid for rid in in_flight if int(rid.split(".")[0]) < FIRST_EVALUATION_ID],
                "outstanding": len(job.rollout.state().groups),
                "evaluated": None if evaluated is None else (evaluated["sample_id"].tolist(), rows_of(evaluated)),
                "results": results,
            }
        )
    job.close()
    return reported


def requests_and_results(engine: ProcessEngine) -> tuple[list[str], list[tuple[str, str]]]:
    """Requests that the engine's process gets from now on, and (request, reason of its end) of the results it sends."""
    started, results, generate, complete = [], [], engine._generate, engine._complete

    def started_here(rid: str, request: dict[str, object]) -> None:
        started.append(rid)
        generate(rid, request)

    def completed(rid: str, result: dict[str, object]) -> None:
        results.append((rid, result.get("finish", "error")))
        complete(rid, result)

    engine._generate, engine._complete = started_here, completed
    return started, results


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("sglang", ""), marks=needs_sglang),
        pytest.param(("sglang", "kill"), marks=[needs_sglang, pytest.mark.nightly]),
        pytest.param(("vllm", ""), marks=[needs_vllm, pytest.mark.nightly]),
        pytest.param(("vllm", "kill"), marks=[needs_vllm, pytest.mark.nightly]),
    ],
)
def trained(ranks, tmp_path_factory, request):
    folder = inputs(tmp_path_factory.mktemp("async"), "qwen3", positions=256, unused=1000)
    results = ranks.run(3, train, folder, ["rollout.max_new_tokens=80", *SLOW], *request.param)
    return folder, list(zip(*results, strict=True))


def test_async_rollout_trains_each_sample_once_with_tokens_of_their_versions(trained):
    folder, iterations = trained
    ids, spans, norms = [], set(), []
    for reported in iterations:
        ids += [i for rank in reported for i in rank["ids"]]
        rows = [row for rank in reported for row in rank["rows"]]
        assert len(rows) == PROMPTS * GROUP
        newest = reported[0]["version"]
        for row in rows:
            written = check_versions(folder, row)
            spans.add(len(written))
            assert max(written) <= newest
            assert torch.equal(row["loss_mask"], row["policy_versions"] >= max(0, newest - MAX_STALENESS))
        metrics = reported[0]["metrics"]
        norms.append(metrics["actor/grad_norm"])
        assert metrics["weight_sync/bytes_received"] == metrics["weight_sync/bytes_lower_bound"] > 0
    assert len(ids) == len(set(ids)) == ITERATIONS * PROMPTS * GROUP
    assert max(norms) > 0  # samples of a group may have equal rewards
    assert max(spans) >= 2, "no sample was in flight in an update"


def test_evaluation_during_asynchronous_generation_has_one_version_and_aborts_nothing(trained):
    _, iterations = trained
    for number, reported in enumerate(iterations, 1):
        if number in EVALUATED:
            evaluated = [rank["evaluated"] for rank in reported]
            assert sorted(i for ids, _ in evaluated for i in ids) == [0, 1, 2, 3], "as where nothing else is generated"
            versions = [row["policy_versions"] for _, rows in evaluated for row in rows]
            assert {v for row in versions for v in row.tolist()} == {-1, number}
            assert any(rank["in_flight"] for rank in reported), "nothing was generated during the evaluation"
            assert {rank["outstanding"] for rank in reported} == {MAX_STALENESS * PROMPTS}, "engines may work ahead"
    (results,) = [rank["results"] for rank in iterations[-1] if rank["results"]]
    assert {finish for _, finish in results} <= {"stop", "length"}
    requests = Counter(rid.split(".")[0] for rid, _ in results)
    # An evaluation begins with the same ids each time; a restarted engine gets its requests again.
    of_training = {sample: count for sample, count in requests.items() if int(sample) < FIRST_EVALUATION_ID}
    assert set(of_training.values()) == {1} and len(requests) - len(of_training) == 4


def hold_back(engine: RolloutEngine, sample_id: int, is_late: Callable[[], bool]) -> None:
    """Makes a real engine deliver one of its samples late."""
    collect, held = engine.collect, []

    def late(timeout: float) -> list[Sample]:
        samples = collect(timeout)
        held.extend(sample for sample in samples if sample.id == sample_id)
        samples = [sample for sample in samples if sample.id != sample_id]
        if is_late():
            samples += held
            held.clear()
        return samples

    engine.collect = late


@pytest.mark.nightly
@pytest.mark.parametrize("engine", [SGLANG])
def test_async_rollout_stale_drop_counts_dropped_samples_and_trains_none(ranks, tmp_path, engine):
    """A sample of the first group takes two updates, where one is permitted."""
    folder = inputs(tmp_path, "qwen3")
    overrides = ["rollout.max_staleness=1", "rollout.stale=drop"]
    results = ranks.run(3, train, folder, overrides, engine, "late")
    trained, dropped = [], 0.0
    for reported in zip(*results, strict=True):
        rows = [row for rank in reported for row in rank["rows"]]
        trained += [i for rank in reported for i in rank["ids"]]
        newest = reported[0]["version"]
        for row in rows:
            written = row["policy_versions"] >= 0
            assert torch.equal(row["loss_mask"], written) and row["policy_versions"][written].min() >= newest - 1
        assert len(rows) == PROMPTS * GROUP
        assert {rank["metrics"]["rollout/tokens_too_old"] for rank in reported} == {0.0}
        dropped += reported[0]["metrics"]["rollout/dropped_samples"]
    assert len(trained) == len(set(trained)) == ITERATIONS * PROMPTS * GROUP
    assert dropped >= GROUP and not set(trained) & set(range(GROUP))


def train_on_servers(folder: Path, urls: list[str], keep_cache: bool) -> list[dict[str, object]]:
    """This rank's samples; the weights are written after each update."""
    job, recipe = engine_job(
        folder, "rollout.mode=async", "rollout.max_staleness=2", "actor.layout=tp2", f"rollout.urls=[{','.join(urls)}]",
        "algorithm.prompts_per_iteration=3", f"algorithm.group_size={GROUP}", f"job.iterations={ITERATIONS}",
        "rollout.max_new_tokens=400", f"rollout.keep_kv_cache={str(keep_cache).lower()}",
    )  # fmt: skip
    job.actor.save(folder / "weights-0", folder / "model")
    rows = []
    for iteration in range(1, ITERATIONS + 1):
        one_iteration(recipe, job, iteration)
        job.actor.save(folder / f"weights-{job.actor.num_updates}", folder / "model")
        (batch,) = job.rollout.train_batches
        rows += [row | {"id": i} for i, row in zip(batch["sample_id"].tolist(), rows_of(batch), strict=True)]
    job.close()
    return rows


@needs_sglang
@pytest.mark.nightly
@pytest.mark.parametrize("keep_cache", [False, True])
def test_async_rollout_on_servers_has_tokens_of_their_versions(ranks, tmp_path, keep_cache):
    """On a server that receives shards and one that receives whole weights."""
    folder, options = inputs(tmp_path, "qwen3", positions=512, unused=1000), {"max_total_tokens": 16384}
    kinds = enumerate((receiving_server, RunningServer))
    with ready(*(kind(folder / "model", folder / f"{i}.log", "tp1", **options) for i, kind in kinds)) as servers:
        results = ranks.run(2, train_on_servers, folder, [server.url for server in servers], keep_cache)
    rows = [row for rank in results for row in rank]
    assert len({row["id"] for row in rows}) == len(rows) == ITERATIONS * 3 * GROUP
    spans = set()
    for row in rows:
        spans.add(len(row["policy_versions"].unique()) - 1)  # -1 in the prompt
        if not keep_cache:  # else keys and values of older weights are part of the context
            check_versions(folder, row)
    assert max(spans) >= 2, "no sample was in flight in an update"
