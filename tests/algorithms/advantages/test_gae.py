"""Token rewards, GAE and returns against a loop over the tokens that count, one row at a time."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mg.algorithms.advantages import (
    discounted_returns,
    gae,
    length_adaptive_lambda,
    moments,
    soft_overlong_penalty,
    token_rewards,
    whiten,
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
def test_gae_against_loops(rows, gamma, lam):
    given_tables = tables(rows, math.nan)
    advantages, returns = gae(*given_tables, gamma, lam)
    plain = discounted_returns(given_tables[0], given_tables[2], gamma)
    for i, row in enumerate(zip(*(table.tolist() for table in given_tables), strict=True)):
        expected = by_hand(*row, gamma, lam)
        assert advantages[i].tolist() == pytest.approx(expected[0], rel=1e-9, abs=1e-9)
        assert returns[i].tolist() == pytest.approx(expected[1], rel=1e-9, abs=1e-9)
        no_values = by_hand(row[0], [0.0] * len(row[0]), row[2], gamma, 1.0)[1]
        assert plain[i].tolist() == pytest.approx(no_values, rel=1e-9, abs=1e-9)


def test_lam_by_row():
    rows = [[(1.0, 0.5, True), (0.0, -0.4, True), (2.0, 0.3, True)]] * 2
    together = gae(*tables(rows, 0.0), 1.0, torch.tensor([0.2, 1.0]))
    for i, lam in enumerate((0.2, 1.0)):
        alone = gae(*tables(rows[:1], 0.0), 1.0, lam)
        for found, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(found[i], expected[0], rtol=1e-6, atol=0)
    assert (together[0][0] - together[0][1]).abs().max() > 0.1


def test_length_adaptive_lambda():
    # alpha l = 1 / (1 - lam), the sum of lam^k; shorter responses than 1 / alpha have lam 0, none a negative one.
    lengths = torch.tensor([1, 20, 40, 4000])
    assert length_adaptive_lambda(lengths, 0.05).tolist() == pytest.approx([0, 0, 0.5, 0.995])
    assert length_adaptive_lambda(torch.tensor([0]), 0.05).tolist() == [0]


def test_token_rewards_with_gaps_in_the_mask_are_on_the_last_token():
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]]).bool()
    expected = [[0, 0, 2.0, 0], [0, 0, 0, -1.0], [0, 0, 0, 0], [0, 0.5, 0, 0]]
    assert token_rewards(torch.tensor([2.0, -1.0, math.nan, 0.5]), mask).tolist() == expected


def test_dtype_and_gradient_stay_out():
    values = torch.ones(1, 2, requires_grad=True)
    advantages, returns = gae(torch.ones(1, 2), values, torch.ones(1, 2).bool(), 1.0, 1.0)
    assert advantages.dtype == returns.dtype == torch.float32
    assert not advantages.requires_grad and not returns.requires_grad


def test_gae_with_invalid_arguments_raises():
    column = torch.zeros(1, 1)
    for gamma, lam, name in ((1.1, 1.0, "gamma is 1.1"), (1.0, -0.1, "lam is -0.1"), (math.nan, 1.0, "gamma is nan")):
        with pytest.raises(UserError, match=name):
            gae(column, column, column.bool(), gamma, lam)
    with pytest.raises(UserError, match="alpha is 0"):
        length_adaptive_lambda(torch.tensor([3]), 0)


TOKENS = st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=20)


@settings(max_examples=100)
@given(TOKENS)
def test_whiten_of_random_values_equals_loops(tokens):
    values = torch.tensor([value if counts else math.nan for value, counts in tokens], dtype=torch.float64)
    mask = torch.tensor([counts for _, counts in tokens])
    kept = [value for value, counts in tokens if counts]
    found = whiten(values, mask, moments(values, mask)).tolist()
    mean = statistics.fmean(kept) if kept else 0.0
    scale = math.sqrt((statistics.variance(kept) if len(kept) > 1 else 0.0) + 1e-8)
    for whitened, (value, counts) in zip(found, tokens, strict=True):
        expected = (value - mean) / scale if counts else 0.0
        assert whitened == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_moments_of_masked_values_are_count_and_sums():
    values, mask = torch.tensor([[1.0, 2.0], [math.inf, -3.0]]), torch.tensor([[True, True], [False, True]])
    found = moments(values, mask)
    assert found.dtype == torch.float64 and found.tolist() == [3.0, 0.0, 14.0]


def test_parts_add_up_and_the_shape_is_any():
    generator = torch.Generator().manual_seed(0)
    values, mask = torch.randn(6, 7, generator=generator) * 3 + 5, torch.rand(6, 7, generator=generator) < 0.6
    whole = whiten(values, mask, moments(values, mask))
    kept = whole[mask]
    assert kept.mean().abs() < 1e-6 and kept.std() == pytest.approx(1, abs=1e-6) and not whole[~mask].any()
    total = moments(values[:2], mask[:2]) + moments(values[2:].flatten(), mask[2:].flatten())
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whiten(values[2:], mask[2:], total), whole[2:], rtol=1e-6, atol=1e-7)
    # What whitening every rank by itself would give is another batch.
    assert (whiten(values[:2], mask[:2], moments(values[:2], mask[:2])) - whole[:2]).abs().max() > 0.01


def test_values_that_agree_become_zero():
    values, mask = torch.full((4,), 0.1), torch.ones(4).bool()
    torch.testing.assert_close(whiten(values, mask, moments(values, mask)), torch.zeros(4), rtol=0, atol=1e-9)
    none = torch.zeros(4).bool()
    assert whiten(values, none, moments(values, none)).tolist() == [0.0] * 4


def test_soft_overlong_penalty_of_every_length_equals_the_formula():
    for length in range(15):
        sloping = (10 - 4 - length) / 4
        expected = 0.0 if length <= 6 else sloping if length <= 10 else -1.0
        assert soft_overlong_penalty(torch.tensor([length]), 10, 4).item() == expected


@pytest.mark.parametrize("buffer", [0, 11, -1])
def test_buffers_that_make_no_sense(buffer):
    with pytest.raises(UserError, match=f"overlong buffer is {buffer} tokens of 10. Write 1 to 10"):
        soft_overlong_penalty(torch.tensor([3]), 10, buffer)
