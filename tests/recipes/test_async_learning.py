"""Learning on samples of older weights: GRPO with staleness up to 4 against GRPO on its own samples."""

import statistics

import pytest

from tests.helpers.tiny_jobs import Metrics
from tests.helpers.traces import needs_sglang
from tests.recipes.tiny_runs import tiny_run

SEEDS, STALENESS = (0, 1, 2), 4
SGLANG = ["rollout.engine=sglang", "rollout.num_ranks=1", "actor.layout=tp1", "job.save=false"]
# The ratio that is clipped is then the one to the policy that wrote each token, whatever its version.
ASYNC = ["rollout.mode=async", f"rollout.max_staleness={STALENESS}", "algorithm.old_logprobs=rollout"]
NOISE = 0.1
"""Standard deviation over seeds of the mean reward of such a run, and of its last part."""
LAST = 50
"""Iteration with which the last part begins."""


def part(lines: Metrics, name: str, first: int = 0, last: int = 60) -> float:
    return statistics.mean(line.get(name, 0.0) for line in lines[first:last])


@pytest.mark.nightly
@needs_sglang
def test_grpo_with_staleness_4_learns_like_synchronous_grpo(ranks, tasks, tmp_path, capsys):
    means, ends, oldest = {}, {}, 0.0
    for name, overrides in {"sync": [], "async": ASYNC}.items():
        runs = []
        for seed in SEEDS:
            folder = tmp_path / f"{name}-{seed}"
            runs.append(tiny_run(ranks, "grpo", tasks(seed), folder, [*SGLANG, *overrides, f"job.seed={seed}"]))
        means[name] = statistics.mean(part(lines, "reward/mean") for lines in runs)
        ends[name] = statistics.mean(part(lines, "reward/mean", LAST) for lines in runs)
        oldest = max(part(lines, f"rollout/staleness_{age}") for lines in runs for age in range(1, STALENESS + 1))
        with capsys.disabled():
            for lines in runs:
                curve = [f"{part(lines, 'reward/mean', start, start + 10):.2f}" for start in range(0, 60, 10)]
                ages = [f"{part(lines, f'rollout/staleness_{age}'):.2f}" for age in range(STALENESS + 1)]
                print(f"\n{name}: reward {' '.join(curve)}, tokens by staleness {' '.join(ages)}", flush=True)
    assert oldest > 0.1  # it does train on older samples
    assert means["async"] >= means["sync"] - NOISE
    assert ends["async"] >= ends["sync"] - NOISE
