"""Jobs whose engines report the candidates of each draw, the likeliest tokens and their load, and train on them."""

import pytest

from tests.helpers.traces import needs_sglang, needs_vllm
from tests.rollout.engine_jobs import checked_steps, engine_job, inputs, train
from verl_mg.run.loop import one_iteration

LIMITS = ["rollout.top_p=0.9", "rollout.min_p=0.01"]
CENTERED = ["algorithm.off_policy.score_centering=8", "rollout.mode=async", "rollout.max_staleness=4"]
BY_LOAD = ["rollout.max_running_requests=auto", "rollout.num_ranks=1"]
STATES = ("growing", "holding", "shrinking")
ENGINES = [pytest.param("sglang", marks=needs_sglang), pytest.param("vllm", marks=needs_vllm)]
ITERATIONS = 4
pytestmark = pytest.mark.nightly


def train_ahead(folder, engine):
    job, recipe = engine_job(folder, *LIMITS, *CENTERED, *BY_LOAD, f"job.iterations={ITERATIONS}", engine=engine)
    lines = [one_iteration(recipe, job, i + 1) | job.rollout.metrics for i in range(ITERATIONS)]
    job.close()
    return lines


@pytest.mark.parametrize("engine", ENGINES)
def test_colocated_engine_with_limited_draws_has_the_log_probs_of_the_candidates(ranks, tmp_path, engine):
    folder = inputs(tmp_path, "qwen3")
    results = ranks.run(1, train, folder, *LIMITS, engine=engine)
    for reported in checked_steps(folder, results):
        assert reported[0]["mismatch"] < 1e-5


@pytest.mark.parametrize("engine", ENGINES)
def test_async_engine_with_limited_draws_is_centred_by_its_likeliest_tokens(ranks, tmp_path, engine):
    lines = ranks.run(2, train_ahead, inputs(tmp_path, "qwen3"), engine)[0]
    for number, line in enumerate(lines):
        assert line["actor/grad_norm"] > 1e-3
        assert 0.5 < line["actor/centering_mass"] < 1
        drift = line["actor/centering_drift"]
        assert drift > 1e-3 if number else drift < 1e-6, "before the first update, engine and trainer are one policy"
        assert sum(line[f"time/engine_{state}"] for state in STATES) == pytest.approx(1)
