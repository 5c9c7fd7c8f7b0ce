"""Jobs that resume from checkpoints: bitwise under the same layout, to 1e-5 under another one."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.rank_pool import RankError
from tests.helpers.tiny_jobs import metrics_of
from tests.helpers.tiny_models import daily_of, tiny_model
from tests.run.jobs import copy_interrupted, opened_files, resumable_job, without_weights
from verl_mg.models.hf_config import SINGLE

BUSY = ("rollout.extra_prompts=2", "rollout.partial_rollout=true", "rollout.max_running_requests=2")
ROLLBACK = "actor.guard={max_kl: 1e-3, action: rollback}"
HALF = "model.dtype=bfloat16"
KL = "algorithm.kl.coefficient=0.05"


def case(name: str, recipe: str, ranks: int, *overrides: str, model: str = "model", daily: bool = False) -> Any:
    return pytest.param(recipe, ranks, model, overrides, id=name, marks=[] if daily else pytest.mark.nightly)


@pytest.mark.parametrize(
    ("recipe", "count", "model", "overrides"),
    [
        case(
            *("pipeline", "pf_ppo", 2, "actor.layout=pp2", "critic.layout=tp2", "critic.recompute=true", "job.seed=1"),
            "critic.optimizer={kind: muon, moments_dtype: bfloat16}",
            daily=True,
        ),
        case(
            *("partial", "grpo", 1, *BUSY, ROLLBACK),
            "actor.optimizer={warmup_steps: 9, cpu_offload: true, nvme_folder: /tmp, moments_dtype: bfloat16}",
            daily=True,
        ),
        case(
            *("fsdp", "ppo", 2, HALF, ROLLBACK, "actor.backend=fsdp", "actor.optimizer.warmup_steps=9"),
            "critic={backend: fsdp, offload: true, recompute: true}",
            daily=True,
        ),
        case("lora_fsdp", "grpo", 2, "actor.backend=fsdp", "actor.lora={rank: 4}", "actor.recompute=true"),
        case("fsdp_mixture", "grpo", 4, "actor.backend=fsdp", "actor.layout=tp2", model="mixture"),
        case(
            *("ppo", "ppo", 2, KL, "algorithm.kl.target=0.01", "critic.offload=true"),
            *("reference.offload=true", "data.curriculum={low: 0.1, high: 0.9}"),
        ),
        case("experts", "grpo", 2, "actor.layout=ep2", "actor.optimizer.cpu_offload=true", model="mixture"),
        case("lora_experts", "grpo", 2, "actor.lora={rank: 4, experts: true}", "actor.layout=ep2", model="mixture"),
        case("lora", "grpo", 2, "actor.lora={rank: 4}", "actor.layout=tp2", HALF),
        case("pf_ppo", "pf_ppo", 2, "algorithm.group_size=4"),
        case("cpu_offload", "grpo", 2, "actor.optimizer.cpu_offload=true", HALF),
        case("half_moments", "grpo", 2, "actor.optimizer.moments_dtype=bfloat16", HALF),
        case(
            *("overlap", "ppo", 2, "critic.offload=true"),
            "megatron.ddp={overlap_grad_reduce: true, overlap_param_gather: true, bucket_size: 1000}",
            *("actor.optimizer.nvme_folder=/tmp", "actor.optimizer.cpu_offload=true"),
            "actor.recompute=[core_attn, layernorm]",
        ),
        case("mixture", "grpo", 2, "actor.layout=ep2", model="mixture"),
        case("muon", "grpo", 4, "actor.layout=tp2", "actor.optimizer.kind=muon", ROLLBACK, HALF),
        case("dtypes", "ppo", 2, HALF, "critic.dtype=float32", "critic.layout=tp2", KL),
        case("critic_pipeline", "ppo", 4, "actor.layout=tp2-pp2", "critic.layout=pp2", "critic.recompute=true"),
        case("curriculum", "grpo", 2, "data.curriculum={low: 0.1, high: 0.9}", "actor.guard.max_kl=1e-4"),
        case("sft", "sft", 2, "algorithm.examples_per_iteration=7"),
    ],
)
def test_resume_under_the_same_layout_is_bitwise_identical(ranks, inputs, tmp_path, recipe, count, model, overrides):
    overrides = [f"model.path={inputs / model}", *overrides, "checkpoint.every=1"]
    ranks.run(count, resumable_job, recipe, inputs, tmp_path / "whole", 3, overrides)
    copy_interrupted(tmp_path / "whole", tmp_path / "parts", 2)
    if not any("lora" in text for text in overrides):  # what is trained is all in the checkpoint
        overrides += [f"model.path={without_weights(inputs / model)}", f"reference.path={inputs / model}"]
    ranks.run(count, resumable_job, recipe, inputs, tmp_path / "parts", 3, overrides)
    whole = metrics_of(tmp_path / "whole")
    assert metrics_of(tmp_path / "parts") == whole
    assert len({line["actor/loss"] for line in whole}) == 3 and whole[-1]["actor/grad_norm"] > 0
    assert sorted(path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()) == ["000002", "000003"]


REFRESHED = {
    "layouts": (2, "actor.layout=tp2", "reference={layout: pp2, offload: true, refresh_every: 2}"),
    "backends": (2, "actor.backend=fsdp", "reference={layout: tp2, refresh_every: 2}"),
    "adapters": (2, "actor={lora: {rank: 4}, layout: tp2}", "reference={layout: tp2, refresh_every: 2}"),
    "apart": (4, "actor={layout: tp2, ranks: 0-1}", "reference={backend: fsdp, ranks: 2-3, refresh_every: 2}"),
}


@pytest.mark.parametrize("name", daily_of(REFRESHED, "layouts"))
def test_resume_with_a_refreshed_reference_is_bitwise_identical(ranks, inputs, tmp_path, name):
    count, *overrides = REFRESHED[name]
    overrides = [*overrides, "algorithm.kl.coefficient=0.05", "algorithm.kl.placement=reward", "checkpoint.every=1"]
    ranks.run(count, resumable_job, "grpo", inputs, tmp_path / "whole", 4, overrides)
    whole = metrics_of(tmp_path / "whole")
    assert [line["reference/refreshed"] for line in whole] == [0, 0, 1, 0]
    divergences = [abs(line["kl/mean"]) for line in whole]
    fresh = max(divergences[0], divergences[2])
    assert fresh < 1e-6 and min(divergences[1], divergences[3]) > 10 * fresh

    def last_line(name: str, overrides: list[str]) -> dict[str, float]:
        """After a resume from the third iteration."""
        copy_interrupted(tmp_path / "whole", tmp_path / name, 3)
        ranks.run(count, resumable_job, "grpo", inputs, tmp_path / name, 4, overrides)
        return metrics_of(tmp_path / name)[-1]

    assert last_line("parts", overrides) == whole[-1]
    if name != "layouts":
        other = [text.replace("layout: tp2, refresh", "layout: pp2, refresh") for text in overrides]
        found = last_line("other", [*other, "reference.backend=megatron"])
        assert found["kl/mean"] == pytest.approx(whole[-1]["kl/mean"], rel=1e-4, abs=1e-6)


@pytest.mark.nightly
def test_checkpoint_of_a_refreshed_reference_without_a_reference_is_refused(ranks, inputs, tmp_path):
    overrides = ["actor={lora: {rank: 4}, layout: tp2}", "reference.layout=tp2", "algorithm.kl.coefficient=0.05"]
    ranks.run(2, resumable_job, "grpo", inputs, tmp_path / "run", 1, [*overrides, "reference.refresh_every=9"])
    with pytest.raises(RankError, match="reference.refresh_every: .*Set it as in the run before"):
        ranks.run(2, resumable_job, "grpo", inputs, tmp_path / "run", 2, overrides)


@pytest.mark.nightly
def test_refresh_of_a_reference_of_another_shape_is_refused(ranks, inputs, tmp_path):
    overrides = [f"reference.path={inputs / 'wide'}", "reference.refresh_every=2", "algorithm.kl.coefficient=0.05"]
    with pytest.raises(RankError, match="reference.refresh_every: the weights of the actor do not fit"):
        ranks.run(1, resumable_job, "grpo", inputs, tmp_path / "run", 1, overrides)


KINDS = {"dense": ["critic.optimizer.kind=muon"], "mixture": ["actor.optimizer.kind=muon"]}
"""Optimizers of the runs that change their layout; all others are AdamW."""


@pytest.fixture(scope="module")
def before(ranks, inputs, tmp_path_factory):
    """A run of two iterations on four ranks, and the same as it was after the first."""
    folder = tmp_path_factory.mktemp("before")
    for name, layout, model in (("dense", "tp2-pp2", "wide"), ("mixture", "tp2-ep2", "mixture")):
        overrides = [f"model.path={inputs / model}", f"actor.layout={layout}", f"critic.layout={layout}"]
        overrides += ["checkpoint.every=1", *KINDS[name]]
        ranks.run(4, resumable_job, "ppo", inputs, folder / f"{name}-on", 2, overrides)
        copy_interrupted(folder / f"{name}-on", folder / name, 1)
    return folder


@pytest.mark.parametrize(
    ("name", "model", "layout", "count"),
    [
        ("dense", "wide", "tp1", 2),
        pytest.param("dense", "wide", "tp4", 4, marks=pytest.mark.nightly),
        ("dense", "wide", "pp2-vpp2", 2),
        pytest.param("dense", "wide", "tp2-cp2", 8, marks=pytest.mark.nightly),
        ("mixture", "mixture", "ep4", 4),
        pytest.param("mixture", "mixture", "pp2", 2, marks=pytest.mark.nightly),
    ],
)
def test_resume_under_another_layout_is_the_same_to_1e5(ranks, inputs, before, tmp_path, name, model, layout, count):
    shutil.copytree(before / name, tmp_path / "run")
    overrides = [f"model.path={without_weights(inputs / model)}", f"actor.layout={layout}", f"critic.layout={layout}"]
    ranks.run(count, resumable_job, "ppo", inputs, tmp_path / "run", 2, overrides + KINDS[name])
    assert_close(tmp_path / "run", before / f"{name}-on", 1e-5)


def assert_close(run: Path, whole: Path, tolerance: float) -> dict[str, float]:
    """The second and last iteration of a resumed run is that of the whole one; returns its metrics."""
    (found,), (expected,) = metrics_of(run)[1:], metrics_of(whole)[1:]
    for metric in ("actor/loss", "critic/loss", "actor/grad_norm", "critic/grad_norm", "reward/mean"):
        assert found[metric] == pytest.approx(expected[metric], abs=tolerance, rel=tolerance), metric
    assert found["actor/grad_norm"] > 1e-3 and found["critic/grad_norm"] > 1e-3
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("chosen", [["actor.pipeline_layers=[3, 1]", "critic.pipeline_layers=[0, 4]"], []])
def test_resume_under_another_number_of_layers_of_stages_is_the_same_to_1e6(ranks, inputs, tmp_path, chosen):
    overrides = ["actor.layout=pp2", "critic={layout: pp2, offload: true}", "checkpoint.every=1"]
    written = [*overrides, "actor.pipeline_layers=[1, 3]", "critic.pipeline_layers=[2, 2]"]
    ranks.run(2, resumable_job, "ppo", inputs, tmp_path / "whole", 2, written)
    copy_interrupted(tmp_path / "whole", tmp_path / "other", 1)
    resumed = [f"model.path={without_weights(inputs / 'model')}", *overrides, *chosen]
    ranks.run(2, resumable_job, "ppo", inputs, tmp_path / "other", 2, resumed)
    found = assert_close(tmp_path / "other", tmp_path / "whole", 1e-6)
    assert found["weight_sync/bytes_received"] == found["weight_sync/bytes_lower_bound"] > 0


@pytest.mark.parametrize(
    ("model", "lora"),
    [
        ("mixture", False),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (("wide", True), ("gpt_oss", False))),
    ],
)
def test_resume_on_the_other_backend_is_the_same_to_1e5(ranks, inputs, tmp_path, model, lora):
    path = tiny_model(tmp_path / model, model) if model == "gpt_oss" else inputs / model
    overrides = [f"model.path={path}", *(["actor.lora={rank: 4}"] if lora else [])]
    written = [*overrides, "actor.backend=fsdp", "critic.layout=tp2", "checkpoint.every=1"]
    resumed = [*overrides, "actor.layout=pp2", "critic.backend=fsdp"]
    ranks.run(2, resumable_job, "ppo", inputs, tmp_path / "same", 2, written)
    copy_interrupted(tmp_path / "same", tmp_path / "other", 1)
    ranks.run(2, resumable_job, "ppo", inputs, tmp_path / "other", 2, resumed)
    assert_close(tmp_path / "other", tmp_path / "same", 1e-5)


@pytest.mark.nightly
def test_resume_with_another_optimizer_names_what_is_missing(ranks, inputs, before, tmp_path):
    shutil.copytree(before / "mixture", tmp_path / "run")
    overrides = [f"model.path={inputs / 'mixture'}", "actor.layout=tp2-ep2", "critic.layout=tp2-ep2"]
    with pytest.raises(RankError, match=r"/exp_avg_sq' is incomplete: the checkpoint has another model or optimizer"):
        ranks.run(4, resumable_job, "ppo", inputs, tmp_path / "run", 2, overrides)


def test_resume_with_other_draws_generates_the_samples_of_the_checkpoint_again(ranks, inputs, tmp_path):
    # Of 24 samples that are needed 7 are generated at a time: four more are complete at the checkpoint.
    drawn = [*BUSY[:2], "rollout.max_running_requests=7", "algorithm.group_size=4", "rollout.temperature=2"]
    overrides = [f"model.path={inputs / 'model'}", *drawn, "checkpoint.every=1", "rollout.top_p=0.9"]
    centered = "algorithm.off_policy.score_centering="
    ranks.run(1, resumable_job, "grpo", inputs, tmp_path / "run", 1, [*overrides, f"{centered}4"])
    for number, (changed, keys) in enumerate(
        (
            ([f"{centered}4"], ""),
            ([f"{centered}2"], "algorithm.off_policy.score_centering"),
            (["algorithm.support=full"], "algorithm.support, algorithm.off_policy.score_centering"),
            ([f"{centered}4", "rollout.temperature=1"], "rollout.temperature"),
        )
    ):
        output = tmp_path / str(number)
        shutil.copytree(tmp_path / "run", output)
        (messages,) = ranks.run(1, resumable_job, "grpo", inputs, output, 2, [*overrides, *changed])
        assert (f"samples of the checkpoint are generated again, for another {keys}\n" in messages) == bool(keys)
        # Other samples are of the weights of the first iteration.
        assert (metrics_of(output)[1]["mismatch/max_abs"] < 1e-5) == bool(keys)


def test_resume_of_a_recipe_that_keeps_samples_with_other_draws_is_refused(ranks, inputs, tmp_path):
    overrides = [f"model.path={inputs / 'model'}", "checkpoint.every=1"]
    ranks.run(1, resumable_job, "pf_ppo", inputs, tmp_path / "run", 1, overrides)
    wrong = (
        r"UserError: rollout.top_k, algorithm.support: the checkpoint has samples .* \(response_buffer\)\. Write what"
    )
    with pytest.raises(RankError, match=wrong):
        ranks.run(1, resumable_job, "pf_ppo", inputs, tmp_path / "run", 2, [*overrides, "rollout.top_k=5"])


def test_resume_opens_only_files_with_needed_boxes(ranks, inputs, tmp_path):
    settings = ["algorithm.prompts_per_iteration=2", "checkpoint.every=1"]
    written = [*settings, "actor.layout=pp2"]  # two data-parallel ranks: 0 and 1 on the first stage
    opened = ranks.run(4, opened_files, "grpo", inputs, tmp_path / "run", 1, written)
    assert sum(names.count(SINGLE) for names in opened) > 2
    opened = [[name for name in names if name != SINGLE] for names in opened]
    files = [f"rank-{rank:05d}.safetensors" for rank in range(4)]
    assert opened == [sorted(["SHA256SUMS", "index.gz", "job.json", files[0]]), [files[1]], [files[2]], [files[3]]]
    # Each rank checks the sum of its file and reads it; rank 0 also checks the other files and reads the state.
    # The model is opened once in all, for its fingerprint in the files of samples.
    opened = ranks.run(4, opened_files, "grpo", inputs, tmp_path / "run", 1, written)
    others = ["SHA256SUMS", "index.gz", *["job.json"] * 3, SINGLE]
    assert opened == [[*others, files[0], files[0]], *[[files[rank]] * 2 for rank in (1, 2, 3)]]
    opened = ranks.run(4, opened_files, "grpo", inputs, tmp_path / "run", 1, [*settings, "actor.layout=tp2-pp2"])
    for rank, names in enumerate(opened):
        stage = {files[0], files[1]} if rank < 2 else {files[2], files[3]}
        assert set(names) - {"SHA256SUMS", "index.gz", "job.json", SINGLE} == stage
        assert names.count(SINGLE) == (rank == 0)
        assert names.count(files[rank]) == 2 and "index.gz" in names
