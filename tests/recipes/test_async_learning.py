"""Learning on samples of older weights: GRPO with staleness 4 against GRPO on its own samples."""

import statistics

import pytest

from tests.tiny_jobs import Metrics
from tests.recipes.tiny_runs import tiny_run
from tests.traces import needs_sglang

SEEDS, STALENESS, LAST = (0, 1, 2), 4, 15
SGLANG = ["rollout.engine=sglang", "rollout.num_ranks=1", "actor.layout=tp1", "job.save=false"]
ASYNC = ["rollout.mode=async", f"rollout.max_staleness={STALENESS}", "algorithm.off_policy.correction=token-tis"]


def end(lines: Metrics) -> float:
    return statistics.mean(line["reward/mean"] for line in lines[-LAST:])


@pytest.mark.nightly
@needs_sglang
@pytest.mark.timeout(1200)
def test_grpo_with_staleness_4_reaches_the_reward_of_samples_of_its_own(ranks, tasks, tmp_path, capsys):
    ends = {}
    for name, overrides in {"sync": [], "async": ASYNC}.items():
        runs = []
        for seed in SEEDS:
            folder = tmp_path / f"{name}-{seed}"
            runs.append(tiny_run(ranks, "grpo", tasks(seed), folder, [*SGLANG, *overrides, f"job.seed={seed}"]))
        ends[name] = [end(lines) for lines in runs]
        with capsys.disabled():
            for lines in runs:
                curve = [statistics.mean(line["reward/mean"] for line in lines[i : i + 10]) for i in range(0, 60, 10)]
                ages = [statistics.mean(line.get(f"rollout/staleness_{age}", 0.0) for line in lines) for age in range(STALENESS + 1)]
                print("\n", name, [f"{value:.2f}" for value in curve], [f"{age:.2f}" for age in ages], flush=True)
    assert statistics.mean(ends["async"]) >= statistics.mean(ends["sync"]) - 0.05
