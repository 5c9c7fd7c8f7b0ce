"""An asynchronous run that is killed with samples in flight: after a resume none is lost and none is trained twice."""

import json
import shutil
from pathlib import Path

import pytest
from pyarrow import parquet

from tests.helpers.machine import Machine
from tests.helpers.rank_pool import RankError, RankPool
from tests.helpers.tiny_jobs import logged, metrics_of, run_recipe
from tests.helpers.traces import needs_sglang
from tests.rollout.engine_jobs import inputs, settings
from verl_mg.run.job_state import read_state
from verl_mg.run.loop import RunMode
from verl_mg.stores.folders import LocalFolder

pytestmark = needs_sglang
RECIPE = Path(__file__).with_name("killed_grpo.py")
PROMPTS, GROUP = 1, 2
ASYNC = [
    "rollout.mode=async",
    # Training, after its first iteration, waits for an engine that always has one sample in flight.
    *("rollout.max_staleness=8", "rollout.max_new_tokens=300", "rollout.max_running_requests=1"),
    *("actor.layout=tp2", "rollout.num_ranks=1", "job.console=false", "checkpoint.every=1"),
    *(f"algorithm.prompts_per_iteration={PROMPTS}", f"algorithm.group_size={GROUP}"),
]


def run_whole(folder: Path, mode: RunMode, *overrides: str) -> None:
    run_recipe(RECIPE, [*settings(folder), *ASYNC, *overrides], mode)


def trained(run: Path, iteration: int) -> dict[int, tuple[int, list[int]]]:
    files = (run / "samples" / f"{iteration:06d}").iterdir()
    columns = ["sample_id", "prompt_id", "tokens"]
    rows = [row for file in files for row in parquet.read_table(file, columns=columns).to_pylist()]
    assert len({row["sample_id"] for row in rows}) == len(rows)
    return {row["sample_id"]: (row["prompt_id"], row["tokens"]) for row in rows}


@pytest.mark.parametrize("delays", [[0.3], pytest.param([0.3, 0.05], marks=pytest.mark.nightly)], ids=["once", "twice"])
def test_async_run_killed_in_flight_loses_no_sample_and_trains_none_twice(ranks, tmp_path, delays):
    """Each kill comes some seconds after an iteration began, in the fourth iteration after a start."""
    folder = inputs(tmp_path, "qwen3", positions=400, unused=2000)
    run, started = folder / "run", 0
    for delay in delays:
        # Too short a pause, and the engine has no token yet; too long, and it has completed all that it may.
        for pause in (0.25, 0.05, 0.5, 0.0, 1.0, 0.1, 2.0, 0.02):
            in_flight = killed_in_flight(folder, started + 4, delay, pause)
            started = int(last_checkpoint(run).name)
            if in_flight:
                break
        else:
            pytest.fail("no kill found a sample in flight")
    iterations = started + 2
    length = f"job.iterations={iterations}"
    (folder / "kill.json").unlink()
    ranks.run(3, run_whole, folder, RunMode(), length)
    steps = [trained(run, iteration) for iteration in range(1, iterations + 1)]
    ids = [i for step in steps for i in step]
    assert [len(step) for step in steps] == [PROMPTS * GROUP] * iterations and len(set(ids)) == len(ids)
    left = read_state(LocalFolder(run / "checkpoints" / f"{iterations:06d}")).rollout
    waiting = [i for group in left.groups for i in range(group.first, group.first + group.samples)]
    assert sorted([*ids, *waiting]) == list(range(left.next_id))
    assert [line["step"] for line in logged(run)] == list(range(1, iterations + 1))
    assert any(line["actor/grad_norm"] > 0 for line in logged(run))
    # Training alone on what was recorded: the same numbers, to the bit.
    shutil.rmtree(run / "checkpoints")
    mode = RunMode(replayed=f"{run}@{iterations}")
    ranks.run(2, run_whole, folder, mode, length, f"job.output={folder / 'replayed'}")
    replayed = [of_training(line) for line in metrics_of(folder / "replayed")]
    assert len(replayed) == iterations and replayed == [of_training(line) for line in metrics_of(run)]


def killed_in_flight(folder: Path, iteration: int, delay: float, pause: float) -> bool:
    """Kills the run; whether its last checkpoint has a partial sample, since an engine wrote tokens in the pause."""
    (folder / "kill.json").write_text(json.dumps({"iteration": iteration, "delay": delay, "pause": pause}))
    pool = RankPool(Machine.this(3))
    try:
        with pytest.raises(RankError, match="the process died"):
            pool.run(3, run_whole, folder, RunMode(), "job.iterations=50")
    finally:
        pool.stop()
    return any(group.partial for group in read_state(LocalFolder(last_checkpoint(folder / "run"))).rollout.groups)


def last_checkpoint(run: Path) -> Path:
    return max(folder for folder in (run / "checkpoints").iterdir() if folder.name.isdigit())


def of_training(line: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name.startswith(("actor/", "reward/", "loss", "step"))}
