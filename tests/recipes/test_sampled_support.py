"""algorithm.support: a run whose draws are limited trains the distributions over their candidates."""

import pytest
from pyarrow import parquet

from tests.helpers.traces import needs_sglang
from tests.recipes.tiny_runs import tiny_run

SIZES = ["job.iterations=2", "job.save=false", "algorithm.prompts_per_iteration=8", "algorithm.group_size=4"]
LIMITS = ["rollout.top_p=0.9", "rollout.top_k=9", "rollout.min_p=0.02", "rollout.temperature=0.8"]
WITH_KL = ["algorithm.kl.coefficient=0.05", "algorithm.kl.estimator=k2"]


def run(ranks, task, output, *overrides, count=1):
    return tiny_run(ranks, "grpo", task, output, [*SIZES, *LIMITS, *WITH_KL, *overrides], count=count)


def recorded(output):
    """Columns of the recorded samples of the first iteration, rows of all ranks."""
    files = sorted((output / "samples" / "000001").glob("*.parquet"))
    rows = [row for file in files for row in parquet.read_table(file).to_pylist()]
    return sorted(rows, key=lambda row: row["sample_id"])


ON_FSDP = ["actor.backend=fsdp", "reference.backend=fsdp"]


@pytest.fixture(scope="module")
def alone(ranks, tasks, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone") / "run"
    return run(ranks, tasks(0), output), output


@pytest.mark.parametrize(
    ("count", "overrides"),
    [
        (1, ON_FSDP),
        pytest.param(2, [*ON_FSDP, "actor.layout=tp2"], marks=pytest.mark.nightly),
        pytest.param(2, ["actor.layout=cp2", "reference.layout=tp2"], marks=pytest.mark.nightly),
        pytest.param(2, ["actor.layout=pp2", *ON_FSDP[1:]], marks=pytest.mark.nightly),
    ],
)
def test_run_on_candidates_has_the_log_probs_of_the_engine_on_any_backend(
    ranks, tasks, tmp_path, alone, count, overrides
):
    found = run(ranks, tasks(0), tmp_path / "run", *overrides, count=count)
    for lines in (alone[0], found):
        assert max(line["mismatch/max_abs"] for line in lines) < 1e-5
        assert abs(lines[0]["kl/mean"]) < 1e-6 < lines[1]["kl/mean"]  # the reference is the policy, at first
        assert min(line["actor/grad_norm"] for line in lines) > 1e-3
    for line, other in zip(found, alone[0], strict=True):
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "kl/mean"):
            assert line[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


@needs_sglang
@pytest.mark.nightly
def test_run_on_candidates_of_sglang_has_its_log_probs(ranks, tasks, tmp_path):
    lines = run(ranks, tasks(0), tmp_path / "run", "rollout.engine=sglang")
    assert max(line["mismatch/max_abs"] for line in lines) < 1e-5 and abs(lines[0]["kl/mean"]) < 1e-6
    assert min(line["actor/grad_norm"] for line in lines) > 1e-3


def test_run_on_candidates_records_them(alone):
    rows = recorded(alone[1])
    for row in rows:
        sizes, ids = row["support_sizes"], iter(row["support_ids"])
        own = [[next(ids) for _ in range(size)] for size in sizes]
        assert next(ids, None) is None and [size > 0 for size in sizes] == row["loss_mask"]
        assert all(token in of_token for token, of_token in zip(row["tokens"], own, strict=True) if of_token)
    largest = max(size for row in rows for size in row["support_sizes"])
    assert 1 < largest <= 9


@pytest.mark.nightly
def test_run_with_the_policy_on_candidates_has_a_penalty_for_other_tokens(ranks, tasks, tmp_path, alone):
    lines = run(ranks, tasks(0), tmp_path / "run", "algorithm.support=policy")
    assert max(line["mismatch/max_abs"] for line in lines) < 1e-5
    # Of equal weights, the reference gives a part of the probability to tokens that were no candidates.
    assert lines[0]["kl/mean"] > 0.05
    assert lines[0]["reward/mean"] == alone[0][0]["reward/mean"]


def test_run_on_the_whole_vocabulary_has_no_candidates(ranks, tasks, tmp_path, alone):
    lines = run(ranks, tasks(0), tmp_path / "run", "algorithm.support=full")
    assert max(line["mismatch/max_abs"] for line in lines) < 1e-5 and abs(lines[0]["kl/mean"]) < 1e-6
    rows, limited = recorded(tmp_path / "run"), recorded(alone[1])
    assert "support_sizes" not in rows[0] and "support_ids" not in rows[0]
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in limited]
    for row, of_candidates in zip(rows, limited, strict=True):
        gained = [b - a for a, b in zip(row["old_logprobs"], of_candidates["old_logprobs"], strict=True)]
        assert min(gained) > -1e-6 and max(gained) > 0.01


@pytest.mark.parametrize("top_k", ["null", pytest.param("6", marks=pytest.mark.nightly)])
def test_divergence_from_a_teacher_is_over_the_candidates_of_both(ranks, tasks, tmp_path, top_k):
    overrides = [f"reference.path={tasks(0) / 'model'}", f"algorithm.divergence.top_k={top_k}", *SIZES[:3]]
    lines = tiny_run(ranks, "gkd", tasks(0), tmp_path / "run", [*overrides, *LIMITS], count=1)
    # The teacher is the student before its first step.
    assert abs(lines[0]["actor/divergence"]) < 1e-6 and lines[0]["actor/grad_norm"] < 1e-5
    mixed = [*overrides[1:], *LIMITS, "job.iterations=1", f"reference.path={tasks(0) / 'mixture'}"]
    (line,) = tiny_run(ranks, "gkd", tasks(0), tmp_path / "other", mixed, count=1)
    assert line["actor/divergence"] > 1e-3 and line["actor/grad_norm"] > 1e-3
