"""Resampling weights by hand, draws by their frequencies and their seed."""

import pytest
import torch

from verl_mg.algorithms.advantages import resampling_weights, select
from verl_mg.errors import UserError

SCORES = torch.tensor([-2.0, 0.5, 1.0, 1.0, 0.0])
WEIGHTS = {
    "pow": [4.0, 0.25, 1.0, 1.0, 0.0],
    "max_min": [1.0, 0.0, 1.0, 1.0, 0.0],
    "max_random": [0.1, 0.1, 0.4, 0.4, 0.1],
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_and_frequencies(kind: str) -> None:
    weights = resampling_weights(SCORES, kind)
    assert weights.tolist() == pytest.approx(WEIGHTS[kind], rel=1e-6, abs=1e-7) and weights.min() > 0
    drawn = select(SCORES, 50_000, kind, 2.0, torch.Generator().manual_seed(0))
    expected = torch.tensor(WEIGHTS[kind]) / sum(WEIGHTS[kind])
    torch.testing.assert_close(torch.bincount(drawn, minlength=5) / 50_000, expected, rtol=0, atol=0.012)


def test_resampling_weights_by_power_equal_the_formula() -> None:
    assert resampling_weights(SCORES, "pow", 1.0).tolist() == pytest.approx([2.0, 0.5, 1.0, 1.0, 0.0], abs=1e-7)


def test_a_seed_decides_the_draw() -> None:
    draws = [select(SCORES, 20, "max_random", 2.0, torch.Generator().manual_seed(seed)).tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert draws[0] == sorted(draws[0]) and len(draws[0]) == 20


def test_scores_of_zero_are_drawn_evenly() -> None:
    drawn = select(torch.zeros(4), 8000, "pow", 2.0, torch.Generator().manual_seed(0))
    assert (torch.bincount(drawn) - 2000).abs().max() < 200


def test_select_with_invalid_arguments_raises() -> None:
    generator = torch.Generator()
    with pytest.raises(UserError, match="'best' is unknown. Write one of pow, max_min, max_random"):
        select(SCORES, 3, "best", 2.0, generator)
    with pytest.raises(UserError, match="power is -1"):
        select(SCORES, 3, "pow", -1.0, generator)
    for scores, count in ((SCORES, -1), (SCORES[:0], 1)):
        with pytest.raises(UserError, match="cannot be drawn"):
            select(scores, count, "pow", 2.0, generator)
    assert select(SCORES[:0], 0, "pow", 2.0, generator).shape == (0,)
