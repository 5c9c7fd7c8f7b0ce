"""Training alone on what a run drew, to the bit the same, and rollouts alone."""

import inspect
import json
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.launched import finished
from tests.helpers.rank_pool import refusal
from tests.helpers.tiny_models import daily_of, tiny_model
from tests.run.jobs import built_job, job, lines_of, make_inputs, samples_of, split_job
from verl_mg.distributed.collectives import all_gather_column
from verl_mg.engines.trajectory import MAX_SEGMENTS
from verl_mg.monitor.sample_reader import SampleReader
from verl_mg.rollout.async_rollout import AsyncRollout
from verl_mg.rollout.rollout import RolloutSource
from verl_mg.rollout.sync_rollout import SyncRollout
from verl_mg.run.loop import RunMode
from verl_mg.run.replay import ReplayRollout

ENGINES = ("weight_sync/", "eval/", "rollout/load_imbalance", "rollout/engine_deaths")
"""The metrics of engines, which a replay does not have."""
CHANGING = """
from verl_mg.recipes.grpo import Config, policy_loss, roles
from functools import partial
from verl_mg.algorithms.advantages import group_relative

def iteration(job, cfg):
    batch = job.rollout.generate(job.prompts.next_batch(cfg.prompts_per_iteration), num_samples=cfg.group_size)
    batch["reward"] = job.reward.wait(batch)
    batch["old_logprobs"] = job.actor.compute_logprobs(batch)
    batch["ref_logprobs"] = job.reference.compute_logprobs(batch)
    batch["reward"] += batch["prompt_length"] / 10
    advantages = group_relative(batch["reward"], batch["group"], batch["trajectory"])
    batch["advantages"] = batch.expand_to_tokens(advantages) * batch["loss_mask"]
    batch["loss_mask"] = batch["loss_mask"] & (batch.positions < batch.expand_to_tokens(batch.lengths) - 1)
    metrics = job.actor.update(batch, partial(policy_loss, cfg=cfg), "token-mean")
    job.rollout.update_weights(job.actor)
    return metrics
"""
ALONE = RunMode(learns=False)
COMMAND = ["-m", "verl_mg", "train", "recipes/grpo.py"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "changing.py").write_text(CHANGING)
    return folder


@pytest.fixture(scope="module")
def first(ranks, inputs, tmp_path_factory):
    """A run of GRPO on two ranks, without checkpoints."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    ranks.run(2, job, "grpo", inputs, folder, [])
    return folder


def of_training(output: Path) -> dict[int, dict[str, float]]:
    lines = lines_of(output)
    return {step: {k: v for k, v in line.items() if not k.startswith(ENGINES)} for step, line in lines.items()}


@pytest.mark.parametrize("recipe", daily_of(("ppo", "changing", "dapo", "grpo", "remax", "pf_ppo"), "ppo", "changing"))
def test_replay_on_the_same_ranks_is_bitwise_identical(ranks, inputs, tmp_path, recipe):
    run, again = tmp_path / "run", tmp_path / "again"
    of = inputs / "changing.py" if recipe == "changing" else recipe
    settings = ["algorithm.kl.coefficient=0.01", "algorithm.num_minibatches=2", f"data.test={inputs / 'sums.jsonl'}"]
    settings += ["algorithm.off_policy.score_centering=2"] if recipe != "changing" else []
    ranks.run(2, job, of, inputs, run, [*settings, "checkpoint.every=1", "checkpoint.keep=3", "evaluation.every=1"])
    shutil.rmtree(run / "checkpoints" / "000002")
    ranks.run(2, job, of, inputs, again, [*settings, "evaluation.every=1"], RunMode(replayed=f"{run}@3"))
    there = of_training(run)
    assert of_training(again) == {step: there[step] for step in (2, 3)}
    assert samples_of(again, 3) == samples_of(run, 3)
    # What the recipe computes for each likeliest token is not recorded, only what it has received of them.
    of_likeliest = {"sampler_top", "old_top", "centering"} & samples_of(run, 3)[0].keys()
    assert of_likeliest == ({"sampler_top"} if recipe != "changing" else set())
    assert there[3]["actor/grad_norm"] > 0 and not (again / "checkpoints").exists()


def test_replay_of_agents_trains_on_segments_and_records_conversations(ranks, inputs, tmp_path):
    run, again = tmp_path / "run", tmp_path / "again"
    settings = ["job.iterations=2", f"data.test={inputs / 'sums.jsonl'}", "evaluation.every=2"]
    ranks.run(2, split_job, "grpo", inputs, run, settings)
    ranks.run(2, job, "grpo", inputs, again, [], RunMode(replayed=f"{run}@2"))
    there, rows = of_training(run), samples_of(run, 2)
    assert of_training(again) == {step: there[step] for step in (1, 2)} and samples_of(again, 2) == rows
    assert there[2]["actor/grad_norm"] > 0 and there[2]["response/samples"] == 10 < len(rows)
    assert lines_of(run)[2]["eval/reward"] > 0
    rewards = {row["trajectory"]: row["reward"] for row in rows}
    assert all(row["reward"] == rewards[row["trajectory"]] for row in rows)
    assert there[2]["reward/mean"] == pytest.approx(sum(rewards.values()) / 10)
    for row in rows:
        assert (row["conversation"] is None) == (row["sample_id"] != row["trajectory"] * MAX_SEGMENTS)
        assert (row["reward"] == 9) == (row["trajectory"] % 4 == 0)
        if row["conversation"] is not None:
            segments = json.loads(row["conversation"])["segments"]
            own = [other for other in rows if other["trajectory"] == row["trajectory"]]
            assert [segment["trained"] for segment in segments] == [sum(other["loss_mask"]) for other in own]
    moved = ranks.run(3, read_conversations, run)
    assert all(texts.keys() == trajectories for texts, trajectories in moved)
    read = {i: text for texts, _ in moved for i, text in texts.items()}
    assert read == {row["trajectory"]: row["conversation"] for row in rows if row["conversation"]}


def read_conversations(run: Path) -> tuple[dict[int, str], set[int]]:
    (rows,) = SampleReader(run).batches(2)
    return dict(rows.conversations), set(rows.batch["trajectory"].tolist())


@pytest.mark.parametrize("count", [1, 3])
def test_replay_on_other_ranks_is_close(ranks, inputs, first, tmp_path, count):
    ranks.run(count, job, "grpo", inputs, tmp_path / "again", [], RunMode(replayed=f"{first}@2"))
    there, here = of_training(first), of_training(tmp_path / "again")
    assert list(here) == [1, 2]
    for step in here:
        # Adam's first step amplifies the last digits of small gradients, which shows in the largest difference of all.
        assert here[step].pop("mismatch/max_abs") == pytest.approx(there[step].pop("mismatch/max_abs"), abs=3e-4)
        assert here[step] == pytest.approx(there[step], rel=1e-4, abs=3e-5)


def read_samples(run: Path) -> dict[str, list[int]]:
    (rows,) = SampleReader(run).batches(2)
    batch = rows.batch
    return {
        "samples": batch["sample_id"].tolist(),
        "groups": batch["group"].tolist(),
        "every": all_gather_column(batch, "sample_id").tolist(),
    }


def test_sample_reader_on_other_ranks_keeps_groups_together(ranks, first):
    output = ranks.run(3, read_samples, first)
    assert [own["samples"] for own in output] == [[10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]
    assert not set(output[0]["groups"]) & set(output[1]["groups"]) and output[0]["every"] == list(range(10, 20))


def test_replay_rollout_methods_have_the_parameters_of_rollout():
    methods = [
        name for name in vars(RolloutSource) if not name.startswith("_") and callable(getattr(SyncRollout, name))
    ]
    assert len(methods) >= 10
    for name in methods:
        sync, *others = [inspect.signature(getattr(kind, name)) for kind in (SyncRollout, AsyncRollout, ReplayRollout)]
        assert all(other.parameters == sync.parameters for other in others), name


def test_replay_with_other_settings_runs(ranks, inputs, first, tmp_path):
    ranks.run(2, job, "grpo", inputs, tmp_path / "again", ["algorithm.clip_low=0.1"], RunMode(replayed=f"{first}@1"))
    assert list(lines_of(tmp_path / "again")) == [1]


def test_replay_of_an_unusable_run_raises(ranks, inputs, first, tmp_path):
    def refused(recipe: str, *overrides: str, of: str) -> str:
        again = (inputs, tmp_path / "again", list(overrides), RunMode(replayed=of))
        (output,) = set(ranks.run(2, refusal, job, recipe, *again))
        assert not (tmp_path / "again").exists()
        return output

    remedy = "Write RUN@ITERATION, such as runs/first@12."
    assert refused("grpo", of=str(first)) == f"--replay {first}: it has no iteration. {remedy}"
    missing = refused("grpo", of=f"{first}@4")
    assert "rank-0.parquet: does not exist. Choose one of the iterations 1 to 3 of the run" in missing
    assert "Name the folder of a run" in refused("grpo", of=f"{tmp_path}@1")
    assert "recorded with the recipe grpo, not dr_grpo" in refused("dr_grpo", of=f"{first}@1")
    other = tiny_model(tmp_path / "other", "qwen3", layers=3)
    assert "recorded with another model" in refused("grpo", f"model.path={other}", of=f"{first}@1")
    named = refused("grpo", "rollout.agent_names=[a]", of=f"{first}@1")
    assert named.endswith("was recorded with [], not [a]. Write rollout.agent_names=[].")
    assert "it contains a run. Choose another folder" in refused("grpo", f"job.output={first}", of=f"{first}@1")
    assert "recipe sft: it generates no samples" in refused("sft", of=f"{first}@1")
    few, torn = tmp_path / "few", tmp_path / "torn"
    ranks.run(2, job, "grpo", inputs, few, ["record.samples_per_rank=3", "job.iterations=1"])
    assert "6 of 10 samples were recorded (record.samples_per_rank)" in refused("grpo", of=f"{few}@1")
    shutil.copytree(first, torn)
    (torn / "samples" / "000001" / "rank-1.parquet").write_bytes(b"PAR1")
    assert "rank-1.parquet: not a readable Parquet file" in refused("grpo", of=f"{torn}@1")


def test_replay_without_what_is_trained_on_is_refused(ranks, inputs, first, tmp_path):
    def refused(override: str, of: Path) -> str:
        again = (inputs, tmp_path / "again", [override], RunMode(replayed=f"{of}@1"))
        return str(*set(ranks.run(2, refusal, job, "grpo", *again)))

    centering = "algorithm.off_policy.score_centering"
    centered = tmp_path / "centered"
    ranks.run(2, job, "grpo", inputs, centered, [f"{centering}=3", "job.iterations=1"])
    assert refused(f"{centering}=4", first) == (
        f"{centering}=4: --replay {first}@1 has 0 likeliest tokens for each token. Leave it out."
    )
    assert refused(f"{centering}=4", centered).endswith("has 3 likeliest tokens for each token. Write 3.")
    assert refused("rollout.top_p=0.9", first) == (
        f"algorithm.support=sampled: --replay {first}@1 has no candidates of its tokens. Write algorithm.support=full."
    )


def test_replay_of_too_few_batches_raises(ranks, inputs, tmp_path):
    ranks.run(1, job, "dapo", inputs, tmp_path / "run", ["algorithm.max_sampling_rounds=1", "job.iterations=1"])
    mode = RunMode(replayed=f"{tmp_path / 'run'}@1")
    (output,) = ranks.run(
        1, refusal, job, "dapo", inputs, tmp_path / "again", ["algorithm.max_sampling_rounds=9"], mode
    )
    assert output.startswith("iteration 1: the recipe requests more batches than were recorded")


def test_rollout_only_scores_and_writes_samples_without_training(ranks, inputs, first, tmp_path):
    ranks.run(2, job, "ppo", inputs, tmp_path / "run", ["checkpoint.every=1", "job.save=true"], ALONE)
    lines = lines_of(tmp_path / "run")
    assert list(lines) == [1, 2, 3] and not [name for name in lines[3] if name.startswith(("actor/", "critic/"))]
    assert lines[3]["reward/mean"] > 0 and lines[3]["rollout/staleness"] == 0
    rows = [row for iteration in (1, 2, 3) for row in samples_of(tmp_path / "run", iteration)]
    assert len(rows) == 30 and {row["policy_version"] for row in rows} == {0} and all(row["values"] for row in rows)
    assert [row["tokens"] for row in rows[:10]] == [row["tokens"] for row in samples_of(first, 1)]
    assert not (tmp_path / "run" / "model").exists() and not (tmp_path / "run" / "checkpoints").exists()


def test_rollout_only_uses_the_weights_of_a_checkpoint(ranks, inputs, tmp_path):
    saved = ["checkpoint.every=1", "actor.optimizer.lr=0.01", "critic.optimizer.lr=0.01"]
    saved += ["critic.offload=true", "reference.offload=true", "algorithm.kl.coefficient=0.01"]
    ranks.run(2, job, "ppo", inputs, tmp_path / "run", saved)
    continued = tmp_path / "alone"
    shutil.copytree(tmp_path / "run" / "checkpoints" / "000002", continued / "checkpoints" / "000002")
    ranks.run(2, job, "ppo", inputs, continued, saved, ALONE)
    assert list(lines_of(continued)) == [3]
    there, here = samples_of(tmp_path / "run", 3), samples_of(continued, 3)
    for name in ("tokens", "rollout_logprobs", "old_logprobs", "values", "policy_version"):
        assert [row[name] for row in here] == [row[name] for row in there]


def test_replay_of_a_rollout_only_run_trains(ranks, inputs, tmp_path):
    settings = [f"model.path={inputs / 'model'}", f"data.train={inputs / 'sums.jsonl'}", "job.iterations=1"]
    settings += [f"reward.function={inputs / 'reward.py'}:score", "rollout.max_new_tokens=6"]
    settings += ["algorithm.prompts_per_iteration=4", f"job.output={tmp_path / 'drawn'}"]
    finished([*COMMAND, "--rollout-only", *settings]).completed()
    ranks.run(1, job, "grpo", inputs, tmp_path / "trained", [], RunMode(replayed=f"{tmp_path / 'drawn'}@1"))
    there, here = lines_of(tmp_path / "drawn")[1], lines_of(tmp_path / "trained")[1]
    assert here["reward/mean"] == there["reward/mean"] and "actor/loss" in here.keys() - there.keys()


def test_rollout_only_with_replay_is_rejected():
    assert "not allowed with" in finished([*COMMAND, "--rollout-only", "--replay", "x@1"]).refusal()


def what_is_built(inputs: Path) -> tuple[bool, int, int]:
    """Of an actor that does not learn: a trainer, and bytes of gradients."""
    built = built_job(inputs, learns=False)
    gradients = sum(getattr(p, "main_grad", p.grad) is not None for p in built.actor.runner.parameters().values())
    return hasattr(built.actor, "trainer"), gradients, dist.get_rank()


def test_rollout_only_builds_no_optimizer(ranks, inputs):
    assert ranks.run(2, what_is_built, inputs) == [(False, 0, 0), (False, 0, 1)]
