"""Spreads of lengths against their own moments, counted over many samples."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mg.planner.inputs import LengthSpread, packed

SPREADS = st.builds(
    lambda prompt, longest, share: LengthSpread(prompt + longest, prompt + share * longest, prompt),
    st.integers(0, 200),
    st.integers(100, 5000),
    st.floats(0.05, 0.98),
)


@given(SPREADS)
def test_mean_and_mean_square_equal_those_of_many_samples(spread):
    power = 1 / spread.exponent
    lengths = [spread.prompt + spread.longest_response * ((n + 0.5) / 4000) ** power for n in range(4000)]
    assert sum(lengths) / 4000 == pytest.approx(spread.mean, rel=0.01)
    assert sum(length**2 for length in lengths) / 4000 == pytest.approx(spread.mean_square, rel=0.01)


@given(SPREADS)
def test_unfinished_samples_add_up_to_the_mean_response(spread):
    """The mean is the sum of the survival function."""
    steps = [(n + 0.5) / 2000 * spread.longest_response for n in range(2000)]
    total = sum(spread.unfinished(step) for step in steps) / 2000 * spread.longest_response
    assert total == pytest.approx(spread.mean_response, rel=0.01)


def test_spread_of_equal_lengths_has_no_tail():
    spread = LengthSpread(100, 100.0, 20)
    assert math.isinf(spread.exponent) and spread.unfinished(79.9) == 1.0 and spread.mean_square == 100**2


def test_packed_equal_rows_equal_hand_count():
    """Three rows of 30 fit 100 tokens; a row longer than that is a micro-batch by itself."""
    assert packed(LengthSpread(30, 30.0), 100).per_sample == 1 / 3
    assert packed(LengthSpread(200, 200.0), 100).per_sample == 1
    assert packed(LengthSpread(30, 30.0), 100).longest_of(8) == 1.0


@given(SPREADS)
def test_packed_micro_batches_have_all_tokens_within_the_budget(spread):
    found, rows = packed(spread, spread.longest), spread.samples()
    assert sum(found.tokens) == sum(rows) and max(found.tokens) <= spread.longest
    assert found.per_sample == len(found.tokens) / len(rows)


@given(SPREADS, st.integers(1, 64))
def test_longest_of_more_ranks_is_longer(spread, count):
    found = packed(spread, spread.longest)
    assert found.longest_of(1) == pytest.approx(1.0)
    assert found.longest_of(count) <= found.longest_of(count + 1) + 1e-9
    assert found.longest_of(10**6) == pytest.approx(max(found.tokens) / (sum(found.tokens) / len(found.tokens)))
