"""All ranks killed, three times (nightly ten), in the middle of an iteration: the run equals the one never killed."""

import json
import random
from pathlib import Path

import pytest

from tests.machine import Machine
from tests.rank_pool import RankError, RankPool
from tests.run.killed_ppo import WRITING
from tests.run.resumed_jobs import job
from tests.tiny_jobs import metrics_of

RECIPE = str(Path(__file__).with_name("killed_ppo"))
PHASES = (
    "update",
    WRITING,
    "generate",
    "weight_sync",
    "forward",
    WRITING,
    "optimizer",
    "row_dispatch",
    WRITING,
    "generate",
)
SETTINGS = ["checkpoint.every=2", "algorithm.kl.coefficient=0.05", "algorithm.kl.target=0.01", "actor.layout=tp2"]


@pytest.fixture
def run(inputs):
    """A job on two ranks of its own, which may die."""

    def started(output: Path, iterations: int) -> None:
        pool = RankPool(Machine.this(), 2)
        try:
            pool.run(2, job, RECIPE, inputs, output, iterations, SETTINGS)
        finally:
            pool.stop()

    return started


@pytest.mark.nightly
def test_kill_in_any_phase_changes_no_metric(run, tmp_path):
    iterations = len(PHASES) + 3
    whole, killed = tmp_path / "whole" / "run", tmp_path / "killed" / "run"
    run(whole, iterations)
    killed.parent.mkdir()
    drawn, plan = random.Random(0), killed.parent / "kill.json"
    for number, phase in enumerate(PHASES, start=1):
        plan.write_text(json.dumps({"phase": phase, "iteration": number, "delay": drawn.uniform(0, 0.02)}))
        with pytest.raises(RankError, match="the process died"):
            run(killed, iterations)
        assert not (killed / "model").exists()
    plan.unlink()
    run(killed, iterations)
    assert metrics_of(killed) == metrics_of(whole)
    assert [line["step"] for line in metrics_of(whole)] == list(range(1, iterations + 1))
