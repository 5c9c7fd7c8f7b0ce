"""One engine whose parts are on two nodes of a rank each: updates, answers, and a part that is killed."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.helpers.traces import needs_sglang, needs_vllm
from tests.rollout.engine_jobs import checked_steps, engine_job, inputs, trained_once
from verl_mg import device


def train(folder: Path, engine: str, kill: bool) -> list[dict[str, object]]:
    """Two iterations; in between the part of the second node may be killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "ranks_of_a_node", lambda ranks: 1)
        job, recipe = engine_job(folder, "actor.layout=tp2", "rollout.layout=tp2", engine=engine)
        reported = [trained_once(job, recipe, folder, "first")]
        follower = job.rollout._engines._follower
        if kill and follower is not None:
            os.killpg(follower._process.pid, signal.SIGKILL)
        reported.append(trained_once(job, recipe, folder, "second"))
        reported[-1]["deaths"] = job.rollout.metrics["rollout/engine_deaths"]
        job.close()
        names = [child.name() for child in psutil.Process().children(recursive=True)]
        assert not [name for name in names if name.startswith(("sglang", "VLLM"))]
    return reported


@pytest.mark.parametrize(
    ("engine", "kill"),
    [
        pytest.param("sglang", False, marks=needs_sglang),
        pytest.param("sglang", True, marks=[needs_sglang, pytest.mark.nightly]),
        pytest.param("vllm", False, marks=[needs_vllm, pytest.mark.nightly]),
        pytest.param("vllm", True, marks=[needs_vllm, pytest.mark.nightly]),
    ],
)
def test_engine_over_two_nodes_serves_the_exported_checkpoint(ranks, tmp_path, engine, kill):
    folder = inputs(tmp_path, "qwen3")
    results = ranks.run(2, train, folder, engine, kill)
    for reported in checked_steps(folder, results):
        received, bound = reported[0]["sync"]
        assert received == bound
    assert {log.name for log in (folder / "run" / "engines").iterdir()} == {"0-node0.log", "0-node1.log"}
