"""All ranks killed several times in the middle of an iteration: the run equals the one that was never killed."""

import json
import random
from pathlib import Path

import pytest
from pyarrow import parquet

from tests.helpers.machine import Machine
from tests.helpers.rank_pool import RankError, RankPool
from tests.helpers.tiny_jobs import metrics_of
from tests.run.jobs import resumable_job
from tests.run.killed_ppo import WRITING

RECIPE, GRPO = (Path(__file__).with_name(name) for name in ("killed_ppo.py", "killed_grpo.py"))
AGENT = Path(__file__).parents[1] / "recipes" / "agents" / "two_questions.py"
PHASES = (
    *("update", WRITING, "generate", "weight_sync", "forward"),
    *(WRITING, "optimizer", "row_dispatch", WRITING, "generate"),
)
SETTINGS = ["checkpoint.every=2", "algorithm.kl.coefficient=0.05", "algorithm.kl.target=0.01", "actor.layout=tp2"]


@pytest.fixture
def run(inputs):
    """A job on two ranks of its own, which may die."""

    def started(output: Path, iterations: int, recipe: Path = RECIPE, settings: list[str] = SETTINGS) -> None:
        pool = RankPool(Machine.this(2))
        try:
            pool.run(2, resumable_job, recipe, inputs, output, iterations, settings)
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


def samples_of(run: Path) -> dict[tuple[int, int], tuple[list[int], list[bool], float]]:
    rows = [row for file in (run / "samples").rglob("rank-*.parquet") for row in parquet.read_table(file).to_pylist()]
    return {(row["iteration"], row["sample_id"]): (row["tokens"], row["loss_mask"], row["reward"]) for row in rows}


@pytest.mark.nightly
def test_kill_while_agents_run_changes_no_sample_and_no_loss(run, tmp_path):
    settings = [f"rollout.agent={AGENT}:run", "data.chat_template=true", "checkpoint.every=1"]
    whole, killed = tmp_path / "whole" / "run", tmp_path / "killed" / "run"
    run(whole, 4, GRPO, settings)
    killed.parent.mkdir()
    plan = killed.parent / "kill.json"
    for iteration, delay in ((2, 0.01), (3, 0.1)):
        plan.write_text(json.dumps({"iteration": iteration, "delay": delay, "pause": 0}))
        with pytest.raises(RankError, match="the process died"):
            run(killed, 4, GRPO, settings)
    plan.unlink()
    run(killed, 4, GRPO, settings)
    samples = samples_of(whole)
    assert samples_of(killed) == samples and len(samples) == 4 * 24
    assert not [*(killed / "samples").rglob(".*")]  # parts of files that the killed processes wrote
    losses = [[line["actor/loss"] for line in metrics_of(folder)] for folder in (killed, whole)]
    # Requests that arrive together are computed together, which changes the last digit of their log-probs.
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and any(losses[0])
