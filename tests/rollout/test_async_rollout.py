"""Asynchronous rollouts on real engines: tokens of each version, checkpoints, killed engines."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.engines import SGLANG, VLLM_NIGHTLY
from tests.rollout.engine_jobs import engine_job, inputs
from verl_mg.engines.engine import RolloutEngine, Sample
from verl_mg.run.loop import one_iteration

ITERATIONS, PROMPTS, GROUP = 6, 1, 2
ASYNC = [
    "rollout.mode=async",
    "rollout.max_staleness=2",
    "actor.layout=tp2",
    "rollout.num_ranks=1",
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
    """This rank's part of each iteration; weights are written after each."""
    job, recipe = engine_job(folder, *ASYNC, *overrides, engine=engine)
    job.actor.save(folder / "weights-0", folder / "model")
    reported = []
    if engine_fault == "late" and job.rollout._engines.engine is not None:
        hold_back(job.rollout._engines.engine, 0, lambda: job.actor.num_updates >= 2)
    for iteration in range(1, ITERATIONS + 1):
        if iteration == 3 and engine_fault == "kill" and job.rollout._engines.engine is not None:
            os.killpg(job.rollout._engines.engine.pid, signal.SIGKILL)
        metrics = one_iteration(recipe, job, iteration) | job.rollout.metrics
        job.actor.save(folder / f"weights-{job.actor.num_updates}", folder / "model")
        (batch,) = job.rollout.train_batches
        greedy = job.rollout.generate_greedy(list(job.prompts)[:1]) if iteration == 2 else None
        reported.append(
            {
                "ids": batch["sample_id"].tolist(),
                "prompts": batch["prompt_id"].tolist(),
                "rows": rows_of(batch),
                "version": job.actor.num_updates - 1,
                "metrics": metrics,
                "greedy": None if greedy is None else rows_of(greedy),
            }
        )
    job.close()
    return reported


def check_versions(folder: Path, rows, newest: int) -> set[int]:
    """Each token's log-prob is that of the weights of its version; returns how many versions wrote one sample."""
    spans = set()
    for row in rows:
        versions, written = row["policy_versions"], row["policy_versions"] >= 0
        spans.add(len(versions[written].unique()))
        assert versions[written].max() <= newest
        assert torch.equal(row["loss_mask"], written & (versions >= newest - 2))
        for version in versions[written].unique().tolist():
            model = AutoModelForCausalLM.from_pretrained(folder / f"weights-{version}", dtype=torch.float32)
            with torch.no_grad():
                scores = model(row["tokens"][None]).logits[0].log_softmax(-1)[:-1]
            own = scores.gather(1, row["tokens"][1:, None])[:, 0]
            of_version = (versions == version)[1:]
            torch.testing.assert_close(row["rollout_logprobs"][1:][of_version], own[of_version], atol=1e-4, rtol=0)
    return spans


@pytest.mark.parametrize("engine_fault", ["", pytest.param("kill", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("engine", [SGLANG, VLLM_NIGHTLY])
def test_async_rollout_trains_each_sample_once_with_tokens_of_their_versions(ranks, tmp_path, engine, engine_fault):
    folder = inputs(tmp_path, "qwen3", positions=256, unused=1000)
    results = ranks.run(3, train, folder, ["rollout.max_new_tokens=80", *SLOW], engine, engine_fault)
    ids, spans, norms = [], set(), []
    for reported in zip(*results, strict=True):
        ids += [i for rank in reported for i in rank["ids"]]
        rows = [row for rank in reported for row in rank["rows"]]
        assert len(rows) == PROMPTS * GROUP
        spans |= check_versions(folder, rows, reported[0]["version"])
        metrics = reported[0]["metrics"]
        norms.append(metrics["actor/grad_norm"])
        assert metrics["weight_sync/bytes_received"] == metrics["weight_sync/bytes_lower_bound"] > 0
    assert len(ids) == len(set(ids)) == ITERATIONS * PROMPTS * GROUP
    assert max(norms) > 0  # samples of a group may have equal rewards
    assert max(spans) >= 2, "no sample was in flight in an update"
    greedy = [row for reported in results for rank in reported for row in rank["greedy"] or []]
    assert len(greedy) == 1 and greedy[0]["policy_versions"].unique().tolist() == [-1, 2]


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
