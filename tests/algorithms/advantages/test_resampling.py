"""Resampling weights by hand, draws by their frequencies and their seed."""

import pytest
import torch

from verl_mg.algorithms.advantages import resampling_weights, select
from verl_mg.errors import UserError

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
def test_weights_and_frequencies(kind: str) -> None:
    weights = resampling_weights(SCORES, GROUPS, kind)
    assert weights.tolist() == pytest.approx(WEIGHTS[kind], rel=1e-6, abs=1e-7) and weights.min() > 0
    drawn = select(weights, 50_000, torch.Generator().manual_seed(0))
    expected = torch.tensor(WEIGHTS[kind]) / sum(WEIGHTS[kind])
    torch.testing.assert_close(torch.bincount(drawn, minlength=5) / 50_000, expected, rtol=0, atol=0.012)


def test_resampling_weights_by_power_equal_the_formula() -> None:
    weights = resampling_weights(SCORES, GROUPS, "pow", 1.0)
    assert weights.tolist() == pytest.approx([2.0, 0.5, 1.0, 1.0, 0.0], abs=1e-7)


@pytest.mark.parametrize(
    ("kind", "probability", "expected"),
    [
        ("best_random", 0.8, [0.1, 0.2, 0.8, 0.8, 0.1]),
        ("best_worst", 0.8, [0.2, 0.2, 0.8, 0.8, 0.0]),
        ("best_random", 1.0, [0.0, 0.0, 1.0, 1.0, 0.0]),  # best-of-N
    ],
)
def test_resampling_weights_by_rank_follow_the_filter_probability(kind: str, probability: float, expected: list[float]):
    weights = resampling_weights(SCORES, GROUPS, kind, filter_probability=probability)
    assert weights.tolist() == pytest.approx(expected, abs=1e-7)


def test_resampling_weights_of_equal_scores_are_the_mean_over_their_ranks_in_any_order() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 5.0]), torch.tensor([1, 1, 1, 1, 1, 2])
    expected = {"best_random": [0.25, 0.125] * 2 + [0.25, 1.0], "best_worst": [1 / 6, 0.25] * 2 + [1 / 6, 1.0]}
    for kind, weights in expected.items():
        assert resampling_weights(scores, groups, kind).tolist() == pytest.approx(weights, abs=1e-7)
        shuffled = torch.randperm(6, generator=torch.Generator().manual_seed(1))
        found = resampling_weights(scores[shuffled], groups[shuffled], kind)
        assert found.tolist() == pytest.approx(torch.tensor(weights)[shuffled].tolist(), abs=1e-6)


def test_a_seed_decides_the_draw() -> None:
    weights = resampling_weights(SCORES, GROUPS, "max_random")
    draws = [select(weights, 20, torch.Generator().manual_seed(seed)).tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert draws[0] == sorted(draws[0]) and len(draws[0]) == 20


def test_scores_of_zero_are_drawn_evenly() -> None:
    weights = resampling_weights(torch.zeros(4), torch.arange(4), "pow")
    drawn = select(weights, 8000, torch.Generator().manual_seed(0))
    assert (torch.bincount(drawn) - 2000).abs().max() < 200


def test_resampling_with_invalid_arguments_raises() -> None:
    generator = torch.Generator()
    with pytest.raises(UserError, match="'best' is unknown. Write one of best_random, best_worst, pow, max_min"):
        resampling_weights(SCORES, GROUPS, "best")
    with pytest.raises(UserError, match="power is -1"):
        resampling_weights(SCORES, GROUPS, "pow", -1.0)
    with pytest.raises(UserError, match="filter_probability is 1.5"):
        resampling_weights(SCORES, GROUPS, "best_random", filter_probability=1.5)
    for weights, count in ((SCORES.exp(), -1), (SCORES[:0], 1)):
        with pytest.raises(UserError, match="cannot be drawn"):
            select(weights, count, generator)
    assert not len(resampling_weights(SCORES[:0], GROUPS[:0], "pow"))
    assert select(SCORES[:0], 0, generator).shape == (0,)
