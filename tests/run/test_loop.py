"""Whole jobs on real ranks: GRPO and SFT run, twice the same is the same, and what they leave can be used."""

from pathlib import Path

import pytest
import torch
from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.rank_pool import refusal
from tests.helpers.tiny_jobs import metrics_of
from tests.run.jobs import GRPO, job, make_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def test_train_grpo_writes_metrics_curve_samples_and_model(ranks, inputs, tmp_path):
    evaluation = [f"data.test={inputs / 'sums.jsonl'}", "evaluation.every=2", "evaluation.prompts=7"]
    ranks.run(2, job, "grpo", inputs, tmp_path / "run", [*GRPO, *evaluation, "job.save=true"])
    metrics = metrics_of(tmp_path / "run")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert ["eval/reward" in line for line in metrics] == [True, False, True, True]
    assert all(line["mismatch/mean_abs"] < 1e-4 for line in metrics[1:])
    assert metrics[1]["response/samples"] == 24
    assert (tmp_path / "run" / "reward_curve.png").stat().st_size > 5000
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert "coefficient: 0.01" in (tmp_path / "run" / "config.yaml").read_text()
    files = sorted((tmp_path / "run" / "samples").glob("*/*"))
    folders = [f"{iteration:06d}" for iteration in (1, 2, 3)]
    assert [file.relative_to(tmp_path / "run" / "samples") for file in files] == [
        Path(folder, f"rank-{rank}.parquet") for folder in folders for rank in (0, 1)
    ]
    records = [row for file in files for row in parquet.read_table(file).to_pylist()]
    assert sorted(r["sample_id"] for r in records) == list(range(72))
    by_group: dict[int, list[float]] = {}
    for record in records:
        by_group.setdefault(record["group"], []).append(record["advantages"][-1])
    assert all(len(group) == 4 and abs(sum(group)) < 1e-5 for group in by_group.values())
    AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    start = AutoModelForCausalLM.from_pretrained(inputs / "model").state_dict()
    assert trained.keys() == start.keys() and any(not torch.equal(trained[k], start[k]) for k in start)


def test_off_policy_correction_of_equal_logprobs_changes_nothing(ranks, inputs, tmp_path):
    overrides = ["algorithm.prompts_per_iteration=3", "algorithm.group_size=2", "job.iterations=1"]
    kinds = {
        "none": "{}",
        "sequence": "{weight: sequence, normalize: true, rejection: {token-k3: 0.01, sequence-sum-k1: [0.5, 2.0]}}",
        "icepop": "{weight: token, low: 0.5}",
    }
    for kind, value in kinds.items():
        ranks.run(2, job, "grpo", inputs, tmp_path / kind, [*overrides, f"algorithm.off_policy={value}"])
    plain = metrics_of(tmp_path / "none")[0]
    assert "actor/correction" not in plain
    for kind in ("sequence", "icepop"):
        found = metrics_of(tmp_path / kind)[0]
        assert found.pop("actor/correction") == pytest.approx(1, abs=1e-3)
        assert not any(found.pop(f"actor/correction_{what}") for what in ("below", "above", "rejected"))
        assert found == pytest.approx(plain, rel=1e-3, abs=1e-6)


def test_train_with_ranks_without_rows_and_missing_reward_parts(ranks, inputs, tmp_path):
    (tmp_path / "reward.py").write_text(
        "from verl_mg.rewards import Reward\n"
        "def score(s): return Reward(len(s.response), {'even': 1.0} if int(s.answer) % 2 == 0 else {})\n"
    )
    overrides = ["algorithm.prompts_per_iteration=1", "algorithm.group_size=4", "job.iterations=6"]
    ranks.run(3, job, "grpo", inputs, tmp_path / "run", [*overrides, f"reward.function={tmp_path}/reward.py:score"])
    metrics = metrics_of(tmp_path / "run")
    assert [line["response/samples"] for line in metrics] == [4] * 6
    seen = [line.get("reward/even") for line in metrics]
    assert set(seen) == {None, 1.0}  # the mean over the rewards that have the part


@pytest.mark.nightly
def test_train_bf16_with_recompute_is_close_to_fp32(ranks, inputs, tmp_path):
    for name, extra in (("full", []), ("half", ["model.dtype=bfloat16", "actor.recompute=true"])):
        ranks.run(2, job, "grpo", inputs, tmp_path / name, [*GRPO, "actor.layout=tp2", "job.save=true", *extra])
    full, half = metrics_of(tmp_path / "full"), metrics_of(tmp_path / "half")
    assert 1e-5 < half[0]["mismatch/mean_abs"] < 0.05
    assert half[0]["actor/entropy"] == pytest.approx(full[0]["actor/entropy"], rel=0.1)
    assert all(line["actor/grad_norm"] > 0 for line in half)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "half" / "model")
    assert saved.dtype is torch.bfloat16


def test_train_sft_lowers_its_loss(ranks, inputs, tmp_path):
    overrides = ["algorithm.examples_per_iteration=40", "job.iterations=25"]
    overrides += ["actor.optimizer={lr: 3e-3, warmup_ratio: 0.2, schedule: linear, min_lr: 2e-3}"]
    ranks.run(2, job, "sft", inputs, tmp_path / "run", overrides)
    losses = [line["actor/loss"] for line in metrics_of(tmp_path / "run")]
    assert losses[-1] < 0.5 * losses[0]
    rates = [line["actor/lr"] for line in metrics_of(tmp_path / "run")]
    assert rates[:5] == pytest.approx([3e-3 * step / 5 for step in range(1, 6)])
    assert rates[5] < rates[4] and rates[-1] == pytest.approx(2e-3)


def test_train_into_an_earlier_run_raises(ranks, inputs, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(AssertionError, match=r"UserError.*holds an earlier run; choose another job\.output"):
        ranks.run(1, job, "sft", inputs, tmp_path, [])


def test_train_with_a_bad_layout_names_the_role(ranks, inputs):
    for message in ranks.run(2, refusal, job, "grpo", inputs, inputs / "refused", ["actor.layout=tp4"]):
        assert message.startswith("actor.layout=tp4: ") and "2" in message
