"""Token rewards, GAE and returns against a loop over the tokens that count, one row at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mg.algorithms.advantages import (
    discounted_returns,
    gae,
    length_adaptive_lambda,
    reinforce_plus_plus,
    token_rewards,
)
from verl_mg.errors import UserError

TOKEN = st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.booleans())
Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def by_hand(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Equation 16 of arXiv:1506.02438 as the double sum that it is, over a list of the masked tokens."""
    steps = [t for t in range(len(mask)) if mask[t]]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for i, t in enumerate(steps):
        for k, s in enumerate(steps[i:]):
            ahead = values[steps[i + k + 1]] if i + k + 1 < len(steps) else 0.0
            advantages[t] += (gamma * lam) ** k * (rewards[s] + gamma * ahead - values[s])
        returns[t] = advantages[t] + values[t]
    return advantages, returns


def tables(rows: list[list[tuple[float, float, bool]]], outside: float) -> Tables:
    """rewards, values, mask: (n, T) of rows of any length, with `outside` outside the mask."""
    width = max(len(row) for row in rows)
    full = [row + [(outside, outside, False)] * (width - len(row)) for row in rows]
    rewards, values, mask = (torch.tensor([[token[i] for token in row] for row in full]) for i in range(3))
    return *(torch.where(mask, column.double(), outside) for column in (rewards, values)), mask


@settings(max_examples=100)
@given(st.lists(st.lists(TOKEN, min_size=1, max_size=8), min_size=1, max_size=3), st.floats(0, 1), st.floats(0, 1))
def test_gae_against_loops(rows: list[list[tuple[float, float, bool]]], gamma: float, lam: float) -> None:
    given_tables = tables(rows, math.nan)
    advantages, returns = gae(*given_tables, gamma, lam)
    plain = discounted_returns(given_tables[0], given_tables[2], gamma)
    for i, row in enumerate(zip(*(table.tolist() for table in given_tables), strict=True)):
        expected = by_hand(*row, gamma, lam)
        assert advantages[i].tolist() == pytest.approx(expected[0], rel=1e-9, abs=1e-9)
        assert returns[i].tolist() == pytest.approx(expected[1], rel=1e-9, abs=1e-9)
        no_values = by_hand(row[0], [0.0] * len(row[0]), row[2], gamma, 1.0)[1]
        assert plain[i].tolist() == pytest.approx(no_values, rel=1e-9, abs=1e-9)
    assert torch.equal(reinforce_plus_plus(given_tables[0], given_tables[2], gamma), plain)


def test_observations_in_the_middle_change_nothing() -> None:
    row = [(0.1, 0.5, True), (0.0, 0.4, True), (1.0, -0.3, True)]
    tool = (9.0, 9.0, False)
    whole = gae(*tables([row], 0.0), 0.9, 0.8)
    holed = gae(*tables([[row[0], tool, tool, row[1], tool, row[2], tool]], 9.0), 0.9, 0.8)
    for without, between in zip(whole, holed, strict=True):
        assert torch.equal(between[:, [0, 3, 5]], without)
        assert between[:, [1, 2, 4, 6]].tolist() == [[0.0] * 4]
        assert without.abs().min() > 0.01


def test_lam_by_row() -> None:
    rows = [[(1.0, 0.5, True), (0.0, -0.4, True), (2.0, 0.3, True)]] * 2
    together = gae(*tables(rows, 0.0), 1.0, torch.tensor([0.2, 1.0]))
    for i, lam in enumerate((0.2, 1.0)):
        alone = gae(*tables(rows[:1], 0.0), 1.0, lam)
        for found, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(found[i], expected[0], rtol=1e-6, atol=0)
    assert (together[0][0] - together[0][1]).abs().max() > 0.1


def test_length_adaptive_lambda() -> None:
    # alpha l = 1 / (1 - lam), the sum of lam^k; shorter responses than 1 / alpha have lam 0, none a negative one.
    lengths = torch.tensor([1, 20, 40, 4000])
    assert length_adaptive_lambda(lengths, 0.05).tolist() == pytest.approx([0, 0, 0.5, 0.995])
    assert length_adaptive_lambda(torch.tensor([0]), 0.05).tolist() == [0]


def test_token_rewards_with_gaps_in_the_mask_are_on_the_last_token() -> None:
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]]).bool()
    expected = [[0, 0, 2.0, 0], [0, 0, 0, -1.0], [0, 0, 0, 0], [0, 0.5, 0, 0]]
    assert token_rewards(torch.tensor([2.0, -1.0, math.nan, 0.5]), mask).tolist() == expected


def test_dtype_and_gradient_stay_out() -> None:
    values = torch.ones(1, 2, requires_grad=True)
    advantages, returns = gae(torch.ones(1, 2), values, torch.ones(1, 2).bool(), 1.0, 1.0)
    assert advantages.dtype == returns.dtype == torch.float32
    assert not advantages.requires_grad and not returns.requires_grad


def test_gae_with_invalid_arguments_raises() -> None:
    column = torch.zeros(1, 1)
    for gamma, lam, name in ((1.1, 1.0, "gamma is 1.1"), (1.0, -0.1, "lam is -0.1"), (math.nan, 1.0, "gamma is nan")):
        with pytest.raises(UserError, match=name):
            gae(column, column, column.bool(), gamma, lam)
    with pytest.raises(UserError, match="alpha is 0"):
        length_adaptive_lambda(torch.tensor([3]), 0)
