"""Every recipe improves its own objective under the configuration that is shipped for it."""

import statistics
import time

import pytest

from tests.helpers.tiny_jobs import RECIPES, Metrics
from tests.helpers.traces import needs_sglang
from tests.recipes.tiny_runs import LETTERS, Goal, tiny_run

RANDOM = (-1.0, -0.75)
"""The mean reward of a policy of random weights, -0.93 to -0.89, and of the first updates."""

REWARD = Goal("reward/mean", start=RANDOM, end=0.1, margin=0.4)
"""Reward of a policy with most digits right for half of the prompts; a constant answer has -0.8."""
SHARE = Goal("reward/mean", start=(0.0, 0.125), end=0.55, margin=0.2)
"""The same with rewards from 0 to 1."""

DAPO = (Goal("reward/mean", (-1.0, -0.85), -0.55, 0.2), Goal("response/truncated", (0.2, 0.6), 0.07, 0.1))
"""It stops answering too long before it answers right."""

SHORT = {
    "dpo": (Goal("actor/loss", (0.6, 0.7), 0.15, 0.1), Goal("actor/margin", (0.0, 0.15), 1.9, 0.6)),
    "reward_model": (Goal("reward_model/loss", (0.5, 0.7), 0.03, 0.1),),
}
"""Goals after 20 iterations; with seeds 0, 1 and 2 the last values are within half of the margins."""

GOALS: dict[str, tuple[Goal, ...]] = {
    **{recipe.stem: (REWARD,) for recipe in sorted(RECIPES.glob("[!_]*.py"))},
    "dapo_mixture": (REWARD,),
    **dict.fromkeys(("maxrl", "gdpo", "mt_grpo", "gigpo", "pass_at_k"), (SHARE,)),
    "ppo": (REWARD, Goal("critic/explained_variance", (-5.0, 0.1), 0.5, 0.35)),
    "vapo": (REWARD, Goal("critic/explained_variance", (-5.0, 0.1), 0.5, 0.35)),
    "distillation": (Goal("distillation/reverse_kl", (3.5, 5.5), 0.2, 0.6), REWARD),
    "gkd": (Goal("actor/divergence", (3.5, 5.5), 0.2, 0.6), REWARD),
    "dpo": (Goal("actor/loss", (0.55, 0.7), 0.05, 0.1), Goal("actor/accuracy", (0.0, 0.9), 1.0, 0.05)),
    "reward_model": (Goal("reward_model/loss", (0.5, 0.7), 0.005, 0.05),),
    "sft": (Goal("actor/loss", (2.2, 3.5), 0.01, 0.2),),
}
SEEDS = (0, 1)


@pytest.mark.parametrize("name", SHORT)
def test_recipe_in_first_iterations_improves_its_objective(ranks, tasks, tmp_path, name):
    lines = tiny_run(ranks, name, tasks(0), tmp_path / name, ["job.iterations=20", "job.save=false"])
    for goal in SHORT[name]:
        goal.check(lines)


@pytest.mark.nightly
def test_dapo_that_replaces_groups_as_they_complete_improves_its_objective(ranks, tasks, tmp_path):
    overrides = ["job.iterations=22", "job.save=false", "algorithm.dynamic_sampling=streaming"]
    lines = tiny_run(ranks, "dapo", tasks(0), tmp_path / "run", overrides)
    for goal in (Goal("rollout/reward_before_filter", (-1.0, -0.85), -0.55, 0.2), DAPO[1]):
        goal.check(lines)
    assert max(line["rollout/rejected_groups"] for line in lines) > 0
    assert all(line["dapo/groups"] == 32 for line in lines)


@pytest.mark.nightly
def test_dapo_with_experts_on_two_ranks_improves_its_objective(ranks, tasks, tmp_path):
    overrides = ["job.iterations=22", "job.save=false"]
    lines = tiny_run(ranks, "dapo_mixture", tasks(0), tmp_path / "run", overrides)
    for goal in DAPO:
        goal.check(lines)
    assert max(line["dapo/rounds"] for line in lines) > 1
    for line in lines:
        assert line["dapo/groups"] == 32
        assert line["weight_sync/bytes_received"] == line["weight_sync/bytes_lower_bound"] > 0


@pytest.mark.nightly
def test_prime_with_a_fixed_policy_learns_outcomes(ranks, tasks, tmp_path):
    # Outcomes of a fixed policy that is often right: a random one never is, and there are no classes to separate.
    tiny_run(ranks, "sft", tasks(0), tmp_path / "sft", ["job.iterations=16"])
    still = [f"model.path={tmp_path}/sft/model", "actor.optimizer.lr=1e-12"]
    quick = ["process_reward.optimizer.lr=1e-3", "algorithm.beta=0.5", "job.iterations=15", "job.save=false"]
    lines = tiny_run(ranks, "prime", tasks(0), tmp_path / "run", [*still, *quick])
    Goal("process_reward/loss", (0.65, 0.71), 0.53, 0.07).check(lines)
    Goal("process_reward/accuracy", (0.3, 0.66), 0.76, 0.08).check(lines)


@pytest.mark.nightly
def test_grpo_with_muon_in_first_iterations_improves_its_objective(ranks, tasks, tmp_path):
    overrides = ["job.iterations=18", "job.save=false", "actor.layout=tp2"]
    overrides += ["actor.optimizer.kind=muon", "actor.optimizer.lr=1e-2"]
    lines = tiny_run(ranks, "grpo", tasks(0), tmp_path / "run", overrides)
    Goal("reward/mean", RANDOM, -0.1, 0.2).check(lines)


@pytest.mark.nightly
def test_grpo_with_entropy_bonus_and_dual_clip_learns_and_keeps_more_entropy(ranks, tasks, tmp_path):
    entropies = []
    for bonus in (0.0, 0.1):
        overrides = ["job.iterations=60", "job.save=false", "algorithm.dual_clip=3"]
        overrides.append(f"algorithm.entropy_coefficient={bonus}")
        lines = tiny_run(ranks, "grpo", tasks(0), tmp_path / str(bonus), overrides)
        REWARD.check(lines)
        entropies.append(part(lines, "actor/entropy", 50))
    without, entropy = entropies
    assert entropy > 1.2 * without > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", GOALS)
def test_recipe_with_every_seed_reaches_its_goal(ranks, tasks, tmp_path, name, capsys):
    runs: list[Metrics] = []
    started = time.perf_counter()
    for seed in SEEDS:
        runs.append(tiny_run(ranks, name, tasks(seed), tmp_path / str(seed), [f"job.seed={seed}"]))
    seconds = (time.perf_counter() - started) / len(SEEDS)
    with capsys.disabled():
        for goal in GOALS[name]:
            print("\n" + row(name, goal, runs, seconds), flush=True)
    for lines in runs:
        for goal in GOALS[name]:
            goal.check(lines)


def row(name: str, goal: Goal, runs: list[Metrics], seconds: float) -> str:
    """Of the second table of recipes/README.md."""
    ends = ["{:.2f} → {:.2f}".format(*goal.means(lines)) for lines in runs]
    return "| " + " | ".join([name, f"`{goal.metric}`", str(len(runs[0])), *ends, f"{seconds:.0f}"]) + " |"


def test_goals_cover_every_configuration_of_the_task():
    assert {config.stem for config in LETTERS.glob("*.yaml")} == GOALS.keys()


def test_goal_check_of_other_directions_raises():
    up, down = Goal("m", (0, 1), 5, 1), Goal("m", (4, 5), 0, 1)
    rising = [{"m": value, "other": 0.0} for value in (0.0, 1.0, 1.0, 4.0, 5.0, 5.0)]
    up.check(rising)
    down.check(rising[::-1])
    for goal, lines in ((up, rising[:3]), (up, rising[3:]), (down, rising), (down, rising[3:])):
        with pytest.raises(AssertionError, match="m (begins|goes)"):
            goal.check(lines)


ASYNC_SEEDS, STALENESS = (0, 1, 2), 4
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
        for seed in ASYNC_SEEDS:
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
