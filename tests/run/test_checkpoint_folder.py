"""The folder of checkpoints: damaged ones, those of another job, a full disk, pruning, and exports."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.rank_pool import RankError
from tests.helpers.tiny_jobs import metrics_of, rewrite_sums
from tests.helpers.tiny_models import daily_of
from tests.run.jobs import built_job, copy_interrupted, resumable_job

SHORT = ["algorithm.prompts_per_iteration=2", "checkpoint.every=1"]


@pytest.fixture(scope="module")
def short(ranks, inputs, tmp_path_factory):
    """A run of three iterations with its last two checkpoints, to be copied."""
    folder = tmp_path_factory.mktemp("short") / "run"
    ranks.run(2, resumable_job, "grpo", inputs, folder, 3, SHORT)
    return folder


@pytest.fixture
def run(short, tmp_path) -> Path:
    return Path(shutil.copytree(short, tmp_path / "run"))


def test_resume_from_a_checkpoint_without_index_raises(ranks, inputs, run):
    for folder in (run / "checkpoints").iterdir():
        (folder / "index.gz").unlink()
        rewrite_sums(folder)
    message = (
        r"UserError: .*SUMS: index\.gz is missing, the checkpoint was written by an earlier version: no other .* Move"
    )
    with pytest.raises(RankError, match=message):
        ranks.run(2, resumable_job, "grpo", inputs, run, 3, SHORT)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "weights cut short": ("rank-00001.safetensors", cut_short),
    "a flipped byte": ("rank-00000.safetensors", flip_a_byte),
    "a flipped byte in the state": ("job.json", flip_a_byte),
    "a file gone": ("rank-00001.safetensors", Path.unlink),
    "a flipped byte in the index": ("index.gz", flip_a_byte),
    "sums cut short": ("SHA256SUMS", cut_short),
    "sums gone": ("SHA256SUMS", Path.unlink),
    "sums that are none": ("SHA256SUMS", lambda file: file.write_bytes(b"\xff\x00")),
}


@pytest.mark.parametrize(
    "name", daily_of(DAMAGES, "weights cut short", "a flipped byte in the state", "sums that are none")
)
def test_resume_with_a_damaged_checkpoint_uses_the_one_before_and_warns(ranks, inputs, short, run, name):
    file, damage = DAMAGES[name]
    damage(run / "checkpoints" / "000003" / file)
    output, other = ranks.run(2, resumable_job, "grpo", inputs, run, 3, SHORT)
    assert metrics_of(run) == metrics_of(short) and not other
    assert file in output and "skipped" in output and "resumes after iteration 2" in output
    # Done again, it is whole again.
    output, _ = ranks.run(2, resumable_job, "grpo", inputs, run, 3, SHORT)
    assert "resumes after iteration 3" in output


def test_prune_does_not_count_damaged_checkpoints(ranks, inputs, run):
    checkpoints = run / "checkpoints"
    (checkpoints / "000003").rename(checkpoints / "000009")
    flip_a_byte(checkpoints / "000009" / "rank-00001.safetensors")
    ranks.run(2, resumable_job, "grpo", inputs, run, 3, [*SHORT, "checkpoint.keep=1"])
    output, _ = ranks.run(2, resumable_job, "grpo", inputs, run, 4, [*SHORT, "checkpoint.keep=1"])
    assert "000009/rank-00001.safetensors: damaged" in output and "resumes after iteration 3" in output


def test_resume_with_only_damaged_checkpoints_raises(ranks, inputs, run):
    for folder in (run / "checkpoints").iterdir():
        flip_a_byte(folder / "rank-00001.safetensors")
    with pytest.raises(RankError, match=r"UserError: .*SHA-256 .*: no other checkpoint is intact\. Move .* away"):
        ranks.run(2, resumable_job, "grpo", inputs, run, 3, SHORT)


def test_sha256sum_accepts_the_sums(short):
    folder = short / "checkpoints" / "000003"
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
    listed = {line.split()[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert listed == {path.name for path in folder.iterdir()} - {"SHA256SUMS"}


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no small file system to be had here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_checkpoint_on_a_full_disk_leaves_the_last_one_and_the_run_continues(
    ranks, inputs, short, small_disk, tmp_path
):
    copy_interrupted(short, tmp_path / "run", 2)
    shutil.copytree(tmp_path / "run" / "checkpoints", small_disk / "checkpoints")
    of_one = sum(file.stat().st_size for file in (small_disk / "checkpoints" / "000002").iterdir())
    (small_disk / "fill").write_bytes(bytes(shutil.disk_usage(small_disk).free - of_one // 2))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints").symlink_to(small_disk / "checkpoints")
    output, _ = ranks.run(2, resumable_job, "grpo", inputs, tmp_path / "run", 4, SHORT)
    assert output.count("not written") == 2 and "No space left on device; the newest is that of iteration 2" in output
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["000002"]
    assert len(metrics_of(tmp_path / "run")) == 4
    (small_disk / "fill").unlink()
    output, _ = ranks.run(2, resumable_job, "grpo", inputs, tmp_path / "run", 5, SHORT)
    assert "resumes after iteration 2" in output
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_prune_with_best_keeps_the_best_and_the_last_checkpoints_and_with_null_all(ranks, inputs, tmp_path):
    overrides = [*SHORT, "checkpoint.keep=1", "checkpoint.best=reward/mean"]
    ranks.run(1, resumable_job, "grpo", inputs, tmp_path / "run", 5, overrides)
    rewards = {line["step"]: line["reward/mean"] for line in metrics_of(tmp_path / "run")}
    best = max(rewards, key=lambda step: (rewards[step], step))
    kept = {int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {best, 5} and best != 5
    misspelt = [*SHORT, "checkpoint.keep=null", "checkpoint.best=reward/maen"]
    (output,) = ranks.run(1, resumable_job, "grpo", inputs, tmp_path / "misspelt", 3, misspelt)
    assert len(list((tmp_path / "misspelt" / "checkpoints").iterdir())) == 3
    assert "checkpoint.best=reward/maen: iteration 2 has no such metric" in output


def test_export_every_writes_models(ranks, inputs, tmp_path):
    ranks.run(2, resumable_job, "grpo", inputs, tmp_path / "run", 4, [*SHORT, "checkpoint.export_every=2"])
    folders = [tmp_path / "run" / "export" / name / "model" for name in ("000002", "000004")]
    first, second = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_resume_with_other_settings_and_test_records_names_them(ranks, inputs, run):
    last, digests = run / "checkpoints" / "000003", {"same": "0", "changed": "0"}
    (last / "job.json").write_text(json.dumps(json.loads((last / "job.json").read_text()) | {"test_records": digests}))
    rewrite_sums(last)
    sets = ", ".join(f"{name}: {{path: {inputs / 'sums.jsonl'}, prompts: 1}}" for name in ("changed", "new"))
    changes = ["actor.optimizer.lr=1e-4", f"data.test={{{sets}}}", "evaluation.samples=1"]
    output, others = ranks.run(2, resumable_job, "grpo", inputs, run, 4, [*SHORT, *changes])
    assert "job.iterations=4 instead of 3" in output and "actor.optimizer.lr=0.0001 instead of 0.002" in output
    assert "the records of data.test.changed are others than when it was written" in output
    assert output.count("the records of") == 1 and "the records of" not in others
    written = json.loads((run / "checkpoints" / "000004" / "job.json").read_text())
    assert written["test_records"] == dict.fromkeys(["changed", "new"], written["prompts"]["prompts"]["records"])


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        ("dr_grpo", "job.iterations=4", r"written by the recipe grpo, not dr_grpo. Choose another job\.output"),
        ("grpo", "job.seed=3", r"checkpoint: written with data of seed=0, now seed=3"),
        ("grpo", "actor.lora={rank: 2}", r"in 'actor/weights' is incomplete: the checkpoint has another model"),
    ],
)
def test_resume_of_another_job_raises(ranks, inputs, run, recipe, override, message):
    with pytest.raises(RankError, match=message):
        ranks.run(2, resumable_job, recipe, inputs, run, 4, [*SHORT, override])


def start_without_restoring(inputs: Path) -> str:
    with pytest.raises(RuntimeError) as caught:
        built_job(inputs, from_checkpoint=True).start()
    return str(caught.value)


def test_job_that_nothing_restores_raises_at_its_start(ranks, inputs):
    (message,) = ranks.run(1, start_without_restoring, inputs)
    assert message.startswith("actor: no checkpoint has restored decoder.final_layernorm.weight, decoder.layers.0.")


def test_run_without_checkpoint_starts_from_the_beginning(ranks, inputs, tmp_path):
    ranks.run(2, resumable_job, "grpo", inputs, tmp_path / "run", 3, [*SHORT, "checkpoint.every=0"])
    whole = metrics_of(tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
    ranks.run(2, resumable_job, "grpo", inputs, tmp_path / "run", 3, [*SHORT, "checkpoint.every=0"])
    assert metrics_of(tmp_path / "run") == whole
    # A finished run is not started again, and neither is another one.
    for override in ("checkpoint.every=0", "checkpoint.every=1"):
        with pytest.raises(RankError, match="holds an earlier run; choose another job.output"):
            ranks.run(2, resumable_job, "grpo", inputs, tmp_path / "run", 3, [*SHORT, override])


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("prompts", "prompts", "position"), 10**6, r"damaged: position 1000000 .* with 40 prompts. Move it away"),
        (("trained", "actor", "trainer", "moments"), -1.0, r"job\.json: trained\.actor\.trainer\.moments: .* damaged"),
        (("trained", "actor", "trainer", "last_good"), [-1.0], r"json: trained\.actor\.trainer\.last_good.* damaged"),
        (("rollout", "next_id"), "three", r"job\.json: rollout\.next_id: .*; the checkpoint is damaged"),
        (("recipe",), None, r"job\.json: recipe: .*; the checkpoint is damaged"),
    ],
)
def test_resume_of_an_impossible_state_with_right_sums_raises(ranks, inputs, run, keys, value, message):
    folder = run / "checkpoints" / "000003"
    tree = node = json.loads((folder / "job.json").read_text())
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    (folder / "job.json").write_text(json.dumps(tree))
    rewrite_sums(folder)
    if "json: " in message.replace("\\", ""):  # found where the sums are, so the one before is taken
        output, _ = ranks.run(2, resumable_job, "grpo", inputs, run, 3, SHORT)
        assert re.search(message, output) and "resumes after iteration 2" in output
    else:
        with pytest.raises(RankError, match=message):
            ranks.run(2, resumable_job, "grpo", inputs, run, 3, SHORT)
