"""Groups that pass a filter: the same as in rounds, replaced as they complete, continued in later calls."""

import re
import time
from collections import Counter, defaultdict

import pytest

from tests.helpers.tiny_models import tiny_model
from tests.rollout.engine_jobs import engine_job, inputs
from tests.rollout.rollout_roles import make_roles
from verl_mg.algorithms.advantages import differ
from verl_mg.errors import UserError
from verl_mg.rewards import Sample
from verl_mg.run.loop import one_iteration

GROUP = 2
NEEDED = 3
MOST = 40


def digits(sample: Sample) -> float:
    """Whether the response has an odd number of characters; slower for some prompts than for others."""
    time.sleep(0.03 * (len(sample.prompt) % 3))
    return float(len(sample.response) % 2)


def constant(sample: Sample) -> float:
    return 1.0


def groups_of(batch, rewards):
    """Samples of each group as (sample, tokens, reward)."""
    rows = zip(batch["group"].tolist(), batch["sample_id"].tolist(), rewards.tolist(), strict=True)
    return [(group, sample, batch.row("tokens", i).tolist(), reward) for i, (group, sample, reward) in enumerate(rows)]


def rewards_by_group(rows):
    rewards = defaultdict(list)
    for group, _, _, reward in rows:
        rewards[group].append(reward)
    return rewards


def roles_with(model, job, reward="digits", **options):
    roles = make_roles(model, reward=reward and f"{__name__}:{reward}", job=job, max_running_requests=2, **options)
    return roles.rollout, roles.reward, roles.feed


def filtered(model, calls, job="filtered", reward="digits", most=MOST, extra_prompts=0):
    """This rank's samples of each call, with the state of the rollout and the next prompt after it."""
    options = {"extra_prompts": extra_prompts, "partial_rollout": extra_prompts > 0}
    rollout, role, feed = roles_with(model, job, reward, **options)
    results = []
    for _ in range(calls):
        batch = rollout.generate_filtered(NEEDED, GROUP, differ, most)
        rows = groups_of(batch, role.wait(batch))
        results.append((rows, rollout.state().next_id, feed.peek(1)[0].id, dict(rollout.metrics)))
    return results


def in_rounds(model):
    """This rank's samples of many prompts, in rollouts of `NEEDED` prompts; and the prompts in order."""
    rollout, role, feed = roles_with(model, "rounds")
    rows, drawn = [], []
    for _ in range(6):
        prompts = feed.next_batch(NEEDED)
        drawn += [prompt.id for prompt in prompts]
        batch = rollout.generate(prompts, GROUP)
        rows += groups_of(batch, role.wait(batch))
    return rows, drawn


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def test_filtered_groups_are_the_first_that_differ_in_rounds(ranks, model):
    rounds = ranks.run(2, in_rounds, model)
    everything, (_, prompts) = sorted(row for rows, _ in rounds for row in rows), rounds[0]
    rewards = rewards_by_group(everything)
    results = ranks.run(2, filtered, model, 2)
    start = 0
    for call in range(2):
        expected = [group for group in sorted(rewards) if group >= start and differ(rewards[group])][:NEEDED]
        rows = sorted(row for result in results for row in result[call][0])
        assert rows == [row for row in everything if row[0] in expected]
        last, admitted = expected[-1], [group for group in sorted(rewards) if start <= group <= expected[-1]]
        for _, next_id, _, metrics in (result[call] for result in results):
            assert next_id == last + GROUP  # nothing was started in vain
            assert metrics["rollout/rejected_groups"] == len(admitted) - NEEDED
            scores = [score for group in admitted for score in rewards[group]]
            assert metrics["rollout/reward_before_filter"] == pytest.approx(sum(scores) / len(scores))
        start = last + GROUP
    assert sum(result[3]["rollout/rejected_groups"] for result in results[0]) > 0
    assert results[0][1][2] == prompts[start // GROUP]


def test_filter_that_rejects_all_groups_ends_with_the_limit(ranks, model):
    for ((rows, next_id, _, metrics),) in ranks.run(2, filtered, model, 1, "none", "constant", 7):
        assert rows == [] and next_id == 7 * GROUP and metrics["rollout/rejected_groups"] == 7


def test_filtered_calls_with_extra_prompts_continue_groups_and_return_each_once(ranks, model):
    results = ranks.run(2, filtered, model, 4, "extra", "digits", MOST, 3)
    seen: Counter[int] = Counter()
    for call in range(4):
        rows = [row for result in results for row in result[call][0]]
        rewards = rewards_by_group(rows).values()
        seen.update(sample for _, sample, *_ in rows)
        assert len(rewards) == NEEDED and all(len(values) == GROUP and differ(values) for values in rewards)
    assert set(seen.values()) == {1}
    assert len({next_id for result in results for _, next_id, _, _ in result[-1:]}) == 1


def refused(model, reward, options):
    rollout, _, _ = roles_with(model, f"refused {reward} {options}", reward, **options)
    with pytest.raises(UserError) as caught:
        rollout.generate_filtered(NEEDED, GROUP, differ, MOST)
    return str(caught.value)


@pytest.mark.parametrize(
    ("reward", "options", "message"),
    [
        ("", {}, "reward.function: .* this job has no reward function"),
        ("digits", {"deterministic": True}, "job.deterministic: .* let the recipe sample in rounds"),
        ("digits", {"prefetch": True}, "rollout.mode=one_step_off: .* Write rollout.mode=sync"),
    ],
)
def test_filtered_call_without_scores_of_single_samples_is_refused(ranks, model, reward, options, message):
    (text,) = ranks.run(1, refused, model, reward, options)
    assert re.search(message, text)


@pytest.mark.nightly
def test_async_rollout_returns_groups_that_differ_and_replaces_others(ranks, tmp_path):
    folder = inputs(tmp_path, "qwen3")
    for reported in ranks.run(3, train_async, folder):
        for rows, metrics in reported:
            assert all(differ(values) for values in rewards_by_group(rows).values())
            assert metrics["dapo/groups"] == NEEDED and metrics["actor/grad_norm"] > 0


def train_async(folder):
    """This rank's rows of some iterations of DAPO with asynchronous rollouts."""
    job, recipe = engine_job(
        folder, "rollout.mode=async", "rollout.max_staleness=2", "actor.layout=tp2", "rollout.num_ranks=1",
        f"algorithm.prompts_per_iteration={NEEDED}", "algorithm.group_size=4", "job.iterations=4",
        "algorithm.dynamic_sampling=streaming", recipe_name="dapo",
    )  # fmt: skip
    reported = []
    for iteration in range(1, 5):
        metrics = one_iteration(recipe, job, iteration) | job.rollout.metrics
        (batch,) = job.rollout.train_batches
        reported.append((groups_of(batch, batch["reward"]), metrics))
    job.close()
    return reported
