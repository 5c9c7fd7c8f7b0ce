"""PPO with SGLang on a rank of its own: a trainer rank is killed, and the engine works on."""

import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.launched import alive, descendants, finished, named, started, torchrun
from tests.helpers.tiny_jobs import RECIPES, metrics_of
from tests.helpers.traces import needs_sglang
from tests.rollout.engine_jobs import inputs, settings

TRAINERS = 4
pytestmark = [pytest.mark.nightly, needs_sglang]


def command(folder: Path, output: Path, program: str = "verl_mg") -> list[str]:
    """A job whose engine has one request at a time: SGLang has no seeds of requests on a CPU."""
    return [
        *("-m", program, "train", str(RECIPES / "ppo.py"), *settings(folder), f"job.output={output}"),
        *("rollout.num_ranks=1", "rollout.max_running_requests=1", "critic.optimizer.lr=3e-3"),
        *("algorithm.prompts_per_iteration=8", "algorithm.group_size=2", "algorithm.kl.coefficient=0.01"),
        *("job.deterministic=true", "job.iterations=12", "job.save=false", "job.console=false", "checkpoint.every=2"),
    ]


def stored(checkpoint: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Weights, moments and batches by file; not the states of generators, of which Python's is never seeded."""
    files = {path.name: load_file(path) for path in checkpoint.glob("rank-*")}
    return {(file, name): values for file, held in files.items() for name, values in held.items() if name != "state"}


def metrics_without_engine(run: Path) -> list[dict[str, float]]:
    """Metrics without the engine's own log-probs, which training does not use.

    Their last bits depend on what the engine had cached of a prompt, and an answer that it has kept caches nothing.
    """
    return [
        {name: value for name, value in line.items() if not name.startswith("mismatch/")} for line in metrics_of(run)
    ]


def test_ppo_with_killed_trainers_keeps_its_engine_and_is_bitwise_identical(tmp_path):
    folder = inputs(tmp_path, "qwen3", unused=100)
    restarts = ("--max-restarts", "5")
    killed_job = command(folder, tmp_path / "killed", "tools.bench.from_engines")
    with started([*torchrun(TRAINERS + 1, *restarts), *killed_job]) as launcher:
        started_engines, still_there = set(), []
        # In the middle of generation, and of training; one iteration after a checkpoint, and right after it.
        for rank, iteration, pause in ((2, 3, 0.2), (0, 6, 0.6), (1, 9, 0.4)):
            launcher.iterations_done(tmp_path / "killed", iteration)
            time.sleep(pause)
            started_engines |= named(launcher.pid, "sglang::")  # those of lost ranks have no parent here
            still_there.append({process for process in started_engines if process.is_running()})
            launcher.rank(rank).send_signal(signal.SIGKILL)
        processes = descendants(launcher.pid)
        code, _, err = launcher.ended()
    assert code == 0 and err.count("was ended by SIGKILL") == 3, err
    # The engine's weights are those of the last checkpoint only right after one.
    sources = [line.partition("actor: ")[2].rpartition(", in ")[0] for line in err.splitlines() if "actor: " in line]
    assert sources == [
        "weights read from the checkpoint, for the engines have version 3",
        "weights taken back from the engines",
        "weights read from the checkpoint, for the engines have version 9",
    ]
    assert len(started_engines) >= 2 and still_there == [started_engines] * 3
    assert not alive([*started_engines, *processes])
    finished([*torchrun(TRAINERS + 1), *command(folder, tmp_path / "whole")]).completed()
    killed, whole = (stored(tmp_path / run / "checkpoints" / "000012") for run in ("killed", "whole"))
    assert killed.keys() == whole.keys() and all(torch.equal(killed[name], whole[name]) for name in whole)
    killed, whole = (metrics_without_engine(tmp_path / run) for run in ("killed", "whole"))
    assert killed == whole and len(whole) == 12
    assert all(line["actor/grad_norm"] > 0 and line["critic/grad_norm"] > 0 for line in whole)
