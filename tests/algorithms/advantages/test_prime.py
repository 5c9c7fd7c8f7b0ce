"""Implicit rewards by hand, PRIME's advantages against loops over rows and tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mg.algorithms.advantages import implicit_rewards, prime_advantages, rloo
from verl_mg.errors import UserError

TOKEN = st.tuples(st.floats(-2, 2), st.booleans())
ROW = st.tuples(st.integers(0, 2), st.floats(-1, 1), st.lists(TOKEN, min_size=4, max_size=4))


def test_implicit_rewards_outside_the_mask_are_zero() -> None:
    columns = torch.tensor([[-1.0, -2.0, math.nan]], requires_grad=True), torch.tensor([[-1.5, -1.0, -1.0]])
    found = implicit_rewards(*columns, torch.tensor([[True, True, False]]), 0.05)
    assert found.tolist() == [pytest.approx([0.025, -0.05, 0.0])] and not found.requires_grad
    with pytest.raises(UserError, match="beta is 0"):
        implicit_rewards(*columns, torch.ones(1, 3).bool(), 0)


@settings(max_examples=50)
@given(st.lists(ROW, min_size=1, max_size=6), st.floats(0.5, 1), st.sampled_from([(1.0, 1.0), (5.0, 0.5)]))
def test_prime_advantages_of_random_groups_equal_loops(
    rows: list[tuple[int, float, list[tuple[float, bool]]]], gamma: float, weights: tuple[float, float]
) -> None:
    groups = torch.tensor([row[0] for row in rows])
    scores = torch.tensor([row[1] for row in rows], dtype=torch.float64)
    mask = torch.tensor([[counts for _, counts in row[2]] for row in rows])
    rewards = torch.tensor([[value for value, _ in row[2]] for row in rows], dtype=torch.float64)
    found = prime_advantages(torch.where(mask, rewards, math.nan), scores, mask, groups, gamma, *weights)

    kept = [[value for value, counts in row[2] if counts] for row in rows]
    means = [sum(values) / len(values) if values else 0.0 for values in kept]
    for i, (group, score, tokens) in enumerate(rows):
        others = [j for j in range(len(rows)) if j != i and rows[j][0] == group]
        baseline = sum(means[j] for j in others) / len(others) if others else means[i]
        outcome = score - sum(rows[j][1] for j in others) / len(others) if others else 0.0
        expected, ahead = [], 0.0
        for value, counts in reversed(tokens):
            if counts:
                ahead = value - baseline + gamma * ahead
            expected.insert(0, weights[0] * ahead + weights[1] * outcome if counts else 0.0)
        assert found[i].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_without_process_rewards_it_is_rloo() -> None:
    scores, groups, mask = torch.tensor([1.0, 0.0, 0.5]), torch.zeros(3).long(), torch.ones(3, 2).bool()
    found = prime_advantages(torch.zeros(3, 2), scores, mask, groups)
    torch.testing.assert_close(found, rloo(scores, groups, torch.arange(3))[:, None].expand(3, 2))
