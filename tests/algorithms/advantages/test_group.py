"""Advantages within groups against loops over groups."""

import itertools
import math
import statistics
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mg.algorithms.advantages import (
    gdpo,
    group_means,
    group_relative,
    informative,
    maxrl,
    opo,
    pass_at_k,
    remax,
    resampling_weights,
    rloo,
    select,
)
from verl_mg.errors import UserError

ROWS = st.lists(st.tuples(st.floats(-10, 10), st.sampled_from([-3, 0, 1, 2, 700])), min_size=1, max_size=24)


def alone(groups: torch.Tensor) -> torch.Tensor:
    """Each row is a sample of its own."""
    return torch.arange(len(groups))


def by_hand(rows: list[tuple[float, int]], normalize_by_std: bool) -> list[float]:
    advantages = []
    for score, group in rows:
        peers = [other for other, theirs in rows if theirs == group]
        advantage = score - statistics.fmean(peers)
        if normalize_by_std:
            advantage /= (statistics.stdev(peers) if len(peers) > 1 else 0.0) + 1e-6
        advantages.append(advantage)
    return advantages


@settings(max_examples=100)
@given(ROWS, st.booleans())
def test_group_relative_of_random_groups_equals_loops(rows, normalize_by_std):
    scores = torch.tensor([score for score, _ in rows], dtype=torch.float64)
    groups = torch.tensor([group for _, group in rows])
    expected = torch.tensor(by_hand(rows, normalize_by_std), dtype=torch.float64)
    advantages = group_relative(scores, groups, alone(groups), normalize_by_std)
    torch.testing.assert_close(advantages, expected, rtol=1e-8, atol=1e-8)


def test_input_dtype_and_inputs_are_kept():
    scores, groups = torch.tensor([1.0, 0.0, 0.0, 5.0]), torch.tensor([4, 4, 4, 9])
    kept = scores.clone()
    advantages = group_relative(scores, groups, alone(groups))
    assert advantages.dtype == torch.float32
    assert torch.equal(scores, kept)
    torch.testing.assert_close(advantages, torch.tensor([1.1547, -0.57735, -0.57735, 0.0]), rtol=1e-4, atol=0)


SEGMENTS = st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 3), st.integers(1, 9), st.integers(1, 4)), max_size=9)


@settings(max_examples=50)
@given(SEGMENTS, st.randoms(use_true_random=False))
def test_group_advantages_of_several_rows_equal_those_of_single_rows(samples, shuffler):
    """Samples (score, group, length, rows), whose rows are in any order: each has the advantage of a single row."""
    numbers = [i for i, (_, _, _, count) in enumerate(samples) for _ in range(count)]
    shuffler.shuffle(numbers)
    rows, ids = torch.tensor(numbers, dtype=torch.int64), torch.tensor([40 - 3 * i for i in range(len(samples))])
    scores = torch.tensor([sample[0] for sample in samples], dtype=torch.float64)
    groups, lengths = (torch.tensor([sample[k] for sample in samples], dtype=torch.int64) for k in (1, 2))
    assert torch.equal(
        opo(scores[rows], lengths[rows], groups[rows], ids[rows]), opo(scores, lengths, groups, ids)[rows]
    )
    for function in (group_relative, partial(group_relative, normalize_by_std=False), rloo, informative, group_means):
        assert torch.equal(function(scores[rows], groups[rows], ids[rows]), function(scores, groups, ids)[rows])


def test_groups_that_teach_nothing_are_exactly_zero():
    scores = torch.tensor([0.1, 0.1, 0.1, 7.3])
    assert group_relative(scores, torch.tensor([0, 0, 0, 1]), torch.arange(4)).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_a_large_offset_does_not_swallow_the_spread():
    scores = torch.tensor([1e6, 1e6 + 1, 1e6, 1e6 + 1])
    torch.testing.assert_close(
        group_relative(scores, torch.zeros(4, dtype=torch.int64), torch.arange(4)),
        torch.tensor([-1.0, 1.0, -1.0, 1.0]) * 0.75**0.5,
    )


@settings(max_examples=100)
@given(ROWS, st.data())
def test_rloo_and_opo_against_loops(rows, data):
    scores, groups = torch.tensor([row[0] for row in rows]).double(), torch.tensor([row[1] for row in rows])
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=len(rows), max_size=len(rows)))
    found = rloo(scores, groups, alone(groups)), opo(scores, torch.tensor(lengths), groups, alone(groups))
    for i, values in enumerate(zip(*(column.tolist() for column in found), strict=True)):
        peers = [j for j in range(len(rows)) if groups[j] == groups[i]]
        others = statistics.fmean(float(scores[j]) for j in peers if j != i) if len(peers) > 1 else float(scores[i])
        optimal = sum(lengths[j] * float(scores[j]) for j in peers) / sum(lengths[j] for j in peers)
        expected = [float(scores[i]) - baseline for baseline in (others, optimal)]
        assert values == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_opo_row_order_changes_no_bit_where_scores_agree():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 3, (60,), generator=generator).double() / 7
    lengths = torch.rand(60, generator=generator, dtype=torch.float64) * 1000  # whole numbers would add up exactly
    groups = torch.randint(0, 3, (60,), generator=generator)
    advantages = opo(scores, lengths, groups, alone(groups))
    for _ in range(20):
        order = torch.randperm(60, generator=generator)
        assert torch.equal(opo(scores[order], lengths[order], groups[order], alone(groups)), advantages[order])


def test_opo_baseline_has_the_least_variance():
    # With squared gradient norm l, the variance of (r - b) times the gradient grows with sum l (r - b)^2.
    scores, lengths = torch.tensor([1.0, 0.0, 3.0]).double(), torch.tensor([2, 5, 1])
    baseline = float(scores[0] - opo(scores, lengths, torch.zeros(3).long(), torch.arange(3))[0])
    around = [float((lengths * (scores - b).square()).sum()) for b in (baseline - 1e-3, baseline, baseline + 1e-3)]
    assert around[1] < min(around[0], around[2]) and baseline == pytest.approx(5 / 8)


def test_remax_of_two_rows_subtracts_greedy_scores():
    assert remax(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.75])).tolist() == [0.75, -0.75]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3)), min_size=1, max_size=12))
def test_informative_against_loops(rows):
    scores, groups = torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
    expected = [len({score for score, theirs in rows if theirs == group}) > 1 for _, group in rows]
    assert informative(scores, groups, alone(groups)).tolist() == expected
    of_group = [[score for score, theirs in rows if theirs == group] for _, group in rows]
    assert group_means(scores, groups, alone(groups)).tolist() == [sum(same) / len(same) for same in of_group]


def test_group_means_of_decimal_fractions_are_exact():
    """One and four of five right: 0.2 and 0.8, PRIME's bounds."""
    scores, groups = torch.tensor([1.0, 0, 0, 0, 0, 1, 1, 1, 1, 0]), torch.tensor([1] * 5 + [2] * 5)
    means = group_means(scores, groups, torch.arange(10))
    assert means.tolist() == [0.2] * 5 + [0.8] * 5 and ((means >= 0.2) & (means <= 0.8)).all()


def test_rows_without_tokens_and_no_rows():
    empty, groups = torch.empty(0), torch.empty(0, dtype=torch.int64)
    for function in (group_relative, rloo, informative, group_means, partial(opo, lengths=groups)):
        assert function(empty, groups=groups, trajectories=groups).shape == (0,)
    assert opo(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), torch.tensor([1, 1]), torch.arange(2)).isfinite().all()
    assert opo(torch.tensor([5.0]), torch.tensor([0]), torch.tensor([1]), torch.arange(1)).tolist() == [0.0]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.just(0.0) | st.floats(1e-3, 10), st.integers(0, 3)), min_size=1, max_size=24))
def test_maxrl_of_random_groups_equals_loops(rows):
    scores = torch.tensor([score for score, _ in rows], dtype=torch.float64)
    groups = torch.tensor([group for _, group in rows])
    expected = []
    for score, group in rows:
        mean = statistics.fmean(other for other, theirs in rows if theirs == group)
        expected.append((score - mean) / mean if mean else 0.0)
    found = maxrl(scores, groups, alone(groups))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_maxrl_in_expectation_is_the_gradient_of_the_truncated_logarithm(count):
    """All 2^N outcomes of a group under a policy that is right with probability p = sigmoid(x), by d/dx."""
    p = 0.3
    expected = 0.0
    for outcome in itertools.product((0, 1), repeat=count):
        scores = torch.tensor(outcome, dtype=torch.float64)
        found = maxrl(scores, torch.zeros(count, dtype=torch.int64), torch.arange(count)).tolist()
        slopes = [1 - p if right else -p for right in outcome]  # of log sigmoid(x) and log sigmoid(-x)
        probability = p ** sum(outcome) * (1 - p) ** (count - sum(outcome))
        expected += probability * sum(a * slope for a, slope in zip(found, slopes, strict=True)) / count
    slope = p * (1 - p) * sum((1 - p) ** (k - 1) for k in range(1, count))
    assert expected == pytest.approx(slope, rel=1e-12)


def best_of_subsets(scores: list[float], k: int) -> list[float]:
    """GRPO's advantage of each subset of k tries, whose reward is the best of them, averaged over those of a try."""
    subsets = list(itertools.combinations(range(len(scores)), min(k, len(scores))))
    rewards = [max(scores[i] for i in subset) for subset in subsets]
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards) + 1e-6
    relative = [(reward - mean) / deviation for reward in rewards]
    return [
        statistics.fmean(a for a, subset in zip(relative, subsets, strict=True) if i in subset)
        for i in range(len(scores))
    ]


@settings(max_examples=60)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=7), min_size=1), st.integers(1, 3))
def test_pass_at_k_of_random_groups_is_the_mean_over_all_subsets(lines, k):
    groups = torch.tensor([number for number, line in enumerate(lines) for _ in line])
    scores = torch.tensor([score for line in lines for score in line], dtype=torch.float64)
    expected = torch.tensor([a for line in lines for a in best_of_subsets(line, k)], dtype=torch.float64)
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(k))
    found = pass_at_k(scores[order], groups[order], alone(groups), k)
    torch.testing.assert_close(found, expected[order], rtol=1e-9, atol=1e-9)


def published(line: list[float], k: int) -> list[float]:
    """`calc_adv` of the authors' code/passk_adv.py (github.com/RUCAIBox/Passk_Training), retold with math.comb."""
    n, right = len(line), int(sum(line))
    rho = 1 - math.comb(n - right, k) / math.comb(n, k)
    sigma = math.sqrt(rho * (1 - rho)) + 1e-6
    wrong_elsewhere = math.comb(max(n - right - 1, 0), k - 1) / math.comb(n - 1, k - 1)
    return [(1 - rho) / sigma if score else (1 - rho - wrong_elsewhere) / sigma for score in line]


@pytest.mark.parametrize("k", [1, 4, 8, 32])
def test_pass_at_k_of_a_group_equals_the_published_formula(k):
    for right in (0, 1, 5, 31, 32):
        line = [1.0] * right + [0.0] * (32 - right)
        found = pass_at_k(torch.tensor(line).double(), torch.zeros(32, dtype=torch.int64), torch.arange(32), k)
        assert found.tolist() == pytest.approx(published(line, k), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("scores", "k", "message"),
    [
        ([1.0, 0.5], 1, r"^reward: it is 0\.5 for a sample.*Return rewards of 0 and 1$"),
        ([1.0, 0.0], 0, "k is 0"),
    ],
)
def test_pass_at_k_of_what_it_cannot_count_is_refused(scores, k, message):
    with pytest.raises(UserError, match=message):
        pass_at_k(torch.tensor(scores), torch.zeros(2, dtype=torch.int64), torch.arange(2), k)


def test_maxrl_with_a_reward_below_0_is_refused():
    with pytest.raises(UserError, match=r"^reward: it is -0\.5 for a sample.*Return rewards from 0 to 1$"):
        maxrl(torch.tensor([1.0, -0.5]), torch.zeros(2, dtype=torch.int64), torch.arange(2))


REWARDS = st.tuples(st.floats(-10, 10), st.none() | st.floats(-1, 1), st.sampled_from([-3, 0, 1]))


@settings(max_examples=100)
@given(st.lists(REWARDS, min_size=1, max_size=24))
def test_gdpo_of_random_groups_equals_loops(rows):
    groups = torch.tensor([row[2] for row in rows])
    rewards = [torch.tensor([row[k] for row in rows], dtype=torch.float64) for k in (0,)]
    rewards.append(torch.tensor([float("nan") if row[1] is None else row[1] for row in rows], dtype=torch.float64))
    first = by_hand([(row[0], row[2]) for row in rows], True)
    known = [i for i, row in enumerate(rows) if row[1] is not None]
    second = dict(zip(known, by_hand([(rows[i][1] or 0.0, rows[i][2]) for i in known], True), strict=True))
    expected = [2 * value - 0.5 * second.get(i, 0.0) for i, value in enumerate(first)]
    found = gdpo(rewards, [2.0, -0.5], groups, alone(groups))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-8, atol=1e-7)


def test_gdpo_of_rewards_that_are_the_same_to_grpo_differs():
    """The paper's example: (0, 1) and (0, 2) in two rewards are the same advantages under GRPO."""
    groups, samples = torch.tensor([0, 0, 1, 1]), torch.arange(4)
    rewards = [torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 0.0, 1.0])]
    summed = group_relative(rewards[0] + rewards[1], groups, samples)
    torch.testing.assert_close(summed[:2], summed[2:], rtol=1e-5, atol=0)
    found = gdpo(rewards, [1.0, 1.0], groups, samples)
    torch.testing.assert_close(found[2:], 2 * found[:2], rtol=1e-5, atol=0)


SCORES = torch.tensor([-2.0, 0.5, 1.0, 1.0, 0.0])
GROUPS = torch.tensor([7, 3, 7, 3, 7])
WEIGHTS = {
    # Group 7 has the scores -2, 1, 0, and group 3 has 0.5, 1.
    "best_random": [0.25, 0.5, 0.5, 0.5, 0.25],
    "best_worst": [0.5, 0.5, 0.5, 0.5, 0.0],
    "pow": [4.0, 0.25, 1.0, 1.0, 0.0],
    "max_min": [1.0, 0.0, 1.0, 1.0, 0.0],
    "max_random": [0.1, 0.1, 0.4, 0.4, 0.1],
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_and_frequencies(kind):
    weights = resampling_weights(SCORES, GROUPS, kind)
    assert weights.tolist() == pytest.approx(WEIGHTS[kind], rel=1e-6, abs=1e-7) and weights.min() > 0
    drawn = select(weights, 50_000, 0)
    expected = torch.tensor(WEIGHTS[kind]) / sum(WEIGHTS[kind])
    torch.testing.assert_close(torch.bincount(drawn, minlength=5) / 50_000, expected, rtol=0, atol=0.012)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("pow", {"power": 1.0}, [2.0, 0.5, 1.0, 1.0, 0.0]),
        ("best_random", {"filter_probability": 0.8}, [0.1, 0.2, 0.8, 0.8, 0.1]),
        ("best_worst", {"filter_probability": 0.8}, [0.2, 0.2, 0.8, 0.8, 0.0]),
        ("best_random", {"filter_probability": 1.0}, [0.0, 0.0, 1.0, 1.0, 0.0]),  # best-of-N
    ],
)
def test_resampling_weights_follow_power_and_filter_probability(kind, options, expected):
    weights = resampling_weights(SCORES, GROUPS, kind, **options)
    assert weights.tolist() == pytest.approx(expected, abs=1e-7)


def test_resampling_weights_of_equal_scores_are_the_mean_of_their_ranks():
    scores, groups = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 5.0]), torch.tensor([1, 1, 1, 1, 1, 2])
    expected = {"best_random": [0.25, 0.125] * 2 + [0.25, 1.0], "best_worst": [1 / 6, 0.25] * 2 + [1 / 6, 1.0]}
    for kind, weights in expected.items():
        assert resampling_weights(scores, groups, kind).tolist() == pytest.approx(weights, abs=1e-7)
        shuffled = torch.randperm(6, generator=torch.Generator().manual_seed(1))
        found = resampling_weights(scores[shuffled], groups[shuffled], kind)
        assert found.tolist() == pytest.approx(torch.tensor(weights)[shuffled].tolist(), abs=1e-6)


def test_a_seed_decides_the_draw():
    weights = resampling_weights(SCORES, GROUPS, "max_random")
    draws = [select(weights, 20, seed).tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert draws[0] == sorted(draws[0]) and len(draws[0]) == 20


def test_scores_of_zero_are_drawn_evenly():
    weights = resampling_weights(torch.zeros(4), torch.arange(4), "pow")
    drawn = select(weights, 8000, 0)
    assert (torch.bincount(drawn) - 2000).abs().max() < 200


def test_resampling_with_invalid_arguments_raises():
    with pytest.raises(UserError, match="'best' is unknown. Write one of best_random, best_worst, pow, max_min"):
        resampling_weights(SCORES, GROUPS, "best")
    with pytest.raises(UserError, match="power is -1"):
        resampling_weights(SCORES, GROUPS, "pow", -1.0)
    with pytest.raises(UserError, match="filter_probability is 1.5"):
        resampling_weights(SCORES, GROUPS, "best_random", filter_probability=1.5)
    for weights, count in ((SCORES.exp(), -1), (SCORES[:0], 1)):
        with pytest.raises(UserError, match="cannot be drawn"):
            select(weights, count, 0)
    assert not len(resampling_weights(SCORES[:0], GROUPS[:0], "pow"))
    assert select(SCORES[:0], 0, 0).shape == (0,)
