"""Whole jobs under the launcher, on all ranks: they learn, repeat bitwise, and resume; and the quickstart."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.gpu.served_jobs import CACHE_TOKENS
from tests.helpers import warm_start
from tests.helpers.launched import Program, started, torchrun
from tests.helpers.tiny_jobs import DIGITS, Metrics, files_of, metrics_of, write_sums
from tests.megatron.layout_models import HALF_HEAD_DIM, make_model
from verl_mg import quickstart as quickstart_module
from verl_mg.quickstart import accuracies, quickstart

JOB_S = 300
RANKS_ON_CPU, ITERATIONS = 4, 4
REHEARSED = {
    "sft_overrides": ["job.iterations=2", "algorithm.examples_per_iteration=8"],
    "grpo_overrides": [
        *("job.iterations=2", "algorithm.prompts_per_iteration=4", "algorithm.group_size=2"),
        "evaluation.prompts=8",
    ],
}
GRPO = [
    *("algorithm.prompts_per_iteration=16", "algorithm.group_size=4", "rollout.max_new_tokens=6"),
    *("actor.optimizer.lr=1e-2", "checkpoint.every=2"),
]
Run = Callable[..., Metrics]
needs_repeatable_sums = pytest.mark.needs(torch="2.14", why="on GPUs it refuses cumsum in a deterministic job")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A model, prompts, and a reward that it can earn."""
    folder = tmp_path_factory.mktemp("inputs")
    make_model(folder / "model", "dense", head_dim=HALF_HEAD_DIM)
    write_sums(folder)
    (folder / "reward.py").write_text(DIGITS)
    return folder


@pytest.fixture(scope="module")
def run(ranks, machine, inputs) -> Run:
    """A function: recipe, folder, overrides -> the run's metrics after so many iterations.

    `options` are those of the launcher; `meanwhile` is called with it while the job runs.
    """

    def job(
        recipe: str,
        output: Path,
        *overrides: str,
        iterations: int = ITERATIONS,
        count: int = 0,
        options: Sequence[str] = (),
        meanwhile: Callable[[Program], None] = lambda launcher: None,
    ) -> Metrics:
        count = count or (ranks.size if machine.gpus else RANKS_ON_CPU)
        reward = [] if recipe == "sft" else [f"reward.function={inputs / 'reward.py'}:digits", *GRPO]
        common = [*files_of(inputs, output), "model.dtype=bfloat16", f"job.iterations={iterations}"]
        program = ["-m", "verl_mg", "train", f"recipes/{recipe}.py", *common, *reward, *overrides]
        # A warm start forks a process that has imported torch.
        with started([*torchrun(count, *options), *program], warm=not machine.gpus) as launcher:
            meanwhile(launcher)
            launcher.ended(JOB_S).completed()
        return metrics_of(output)

    return job


@pytest.fixture(scope="module")
def deterministic(run, tmp_path_factory) -> Callable[[], Metrics]:
    """A function that returns the metrics of a whole run, which is made once."""
    return cache(lambda: run("grpo", tmp_path_factory.mktemp("whole"), "job.deterministic=true"))


@pytest.mark.timeout(JOB_S)
def test_sft_job_on_all_ranks_lowers_its_loss(run, tmp_path):
    settings = ("algorithm.examples_per_iteration=16", "actor.optimizer.lr=1e-2", "checkpoint.every=0")
    losses = [line["actor/loss"] for line in run("sft", tmp_path, *settings, iterations=12) if "actor/loss" in line]
    assert losses[-1] < 0.7 * losses[0]


@needs_repeatable_sums
@pytest.mark.timeout(2 * JOB_S)
def test_deterministic_job_run_twice_is_bitwise_identical(run, deterministic, tmp_path):
    first = deterministic()
    assert len(first) > ITERATIONS - 1 and first[-1]["actor/grad_norm"] > 0
    assert run("grpo", tmp_path, "job.deterministic=true") == first


@needs_repeatable_sums
@pytest.mark.timeout(3 * JOB_S)
def test_resumed_job_is_bitwise_identical_to_whole_one(run, deterministic, tmp_path):
    whole = deterministic()
    assert len(run("grpo", tmp_path, "job.deterministic=true", iterations=2)) < len(whole)
    assert run("grpo", tmp_path, "job.deterministic=true") == whole


@needs_repeatable_sums
@pytest.mark.timeout(2 * JOB_S)
def test_killed_rank_is_replaced_and_the_job_is_bitwise_identical(run, deterministic, tmp_path):
    whole = deterministic()

    def kill_a_rank(launcher: Program) -> None:
        launcher.iterations_done(tmp_path, 3, JOB_S)
        launcher.rank(0).kill()

    restarts = ("--max-restarts", "2")
    assert run("grpo", tmp_path, "job.deterministic=true", options=restarts, meanwhile=kill_a_rank) == whole


@pytest.mark.timeout(JOB_S)
@pytest.mark.parametrize("divergence", ["{kind: js}", "{kind: forward, top_k: 4}"])
def test_gkd_job_on_all_ranks_lowers_its_divergence(run, tmp_path, divergence):
    """The teacher has other sizes."""
    make_model(tmp_path / "teacher", "dense", head_dim=HALF_HEAD_DIM, ffn=128)
    settings = (f"reference.path={tmp_path / 'teacher'}", f"algorithm.divergence={divergence}", "checkpoint.every=0")
    lines = run("gkd", tmp_path / "run", *settings, iterations=12)
    divergences = [line["actor/divergence"] for line in lines if "actor/divergence" in line]
    assert divergences[-1] < 0.7 * divergences[0]


@pytest.mark.timeout(JOB_S)
@pytest.mark.parametrize("settings", [[], ["fsdp.cpu_offload=true"]])
def test_job_on_fsdp_agrees_with_its_engines(run, tmp_path, settings):
    """One rank: log-probs of engines are those of training, before and after updates."""
    metrics = run("grpo", tmp_path, "actor.backend=fsdp", *settings, iterations=2, count=1)
    assert metrics[-1]["actor/grad_norm"] > 0
    mismatch = [line["mismatch/mean_abs"] for line in metrics if "mismatch/mean_abs" in line]
    assert mismatch and all(error < 0.05 for error in mismatch)


@pytest.fixture
def run_with_sglang(run, machine, tmp_path) -> Run:
    """A function: name of a folder, overrides -> metrics of a GRPO job with an engine of SGLang on each GPU.

    The model has heads of a width that its kernels have.
    """
    heads = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512}
    model = quickstart_module.make_tiny_model(tmp_path / "model", "qwen3", init_std=0.06, **heads)
    settings = [f"model.path={model}", "actor.offload=true", "rollout.engine=sglang"]
    settings.append(f"rollout.sglang.max_total_tokens={CACHE_TOKENS}")  # so that several jobs can share a GPU
    return lambda name, *overrides, **options: run(
        "grpo", tmp_path / name, *settings, *overrides, count=machine.gpus, **options
    )


@pytest.mark.needs(gpu=True, sglang=True)  # tests/roles has such jobs with engines on the CPU
@pytest.mark.timeout(2 * JOB_S)
def test_job_with_sglang_engines_agrees_with_them(run_with_sglang):
    """Log-probs of the engines are those of training, before and after updates."""
    metrics = run_with_sglang("run")
    assert all(line["mismatch/mean_abs"] < 0.05 for line in metrics if "mismatch/mean_abs" in line)


@pytest.mark.needs(gpu=True, sglang=True)  # tests/roles has such jobs with engines on the CPU
@pytest.mark.timeout(3 * JOB_S)
def test_deterministic_job_with_sglang_engines_repeats_and_resumes_bitwise(run_with_sglang):
    """The job that is resumed repeats the first half in other processes."""
    whole = run_with_sglang("whole", "job.deterministic=true")
    assert len(run_with_sglang("resumed", "job.deterministic=true", iterations=2)) < len(whole)
    assert run_with_sglang("resumed", "job.deterministic=true") == whole
    assert whole[-1]["actor/grad_norm"] > 0


@pytest.mark.timeout(3 * JOB_S)
def test_quickstart_raises_accuracy(machine, tmp_path, monkeypatch):
    if machine.gpus:
        quickstart(str(tmp_path))
    else:
        warm = warm_start.shared()
        monkeypatch.setattr(quickstart_module.sys, "executable", warm.python)
        monkeypatch.setenv("PYTHON_EXEC", warm.python)
        quickstart(str(tmp_path), **REHEARSED)
    before, after = accuracies(tmp_path / "grpo" / "metrics.jsonl")
    assert json.loads((tmp_path / "grpo" / "model" / "config.json").read_text())["model_type"] == "qwen3"
    assert after > before + 0.2 if machine.gpus else 0 <= after <= 1
