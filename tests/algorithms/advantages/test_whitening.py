"""Whitening against the statistics module, whole and by parts."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mg.algorithms.advantages import moments, whiten

TOKENS = st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=20)


@settings(max_examples=100)
@given(TOKENS, st.booleans())
def test_whiten_of_random_values_equals_loops(tokens: list[tuple[float, bool]], shift_mean: bool) -> None:
    values = torch.tensor([value if counts else math.nan for value, counts in tokens], dtype=torch.float64)
    mask = torch.tensor([counts for _, counts in tokens])
    kept = [value for value, counts in tokens if counts]
    found = whiten(values, mask, moments(values, mask), shift_mean).tolist()
    mean = statistics.fmean(kept) if kept else 0.0
    scale = math.sqrt((statistics.variance(kept) if len(kept) > 1 else 0.0) + 1e-8)
    for whitened, (value, counts) in zip(found, tokens, strict=True):
        expected = (value - mean) / scale + (0.0 if shift_mean else mean) if counts else 0.0
        assert whitened == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_moments_of_masked_values_are_count_and_sums() -> None:
    values, mask = torch.tensor([[1.0, 2.0], [math.inf, -3.0]]), torch.tensor([[True, True], [False, True]])
    found = moments(values, mask)
    assert found.dtype == torch.float64 and found.tolist() == [3.0, 0.0, 14.0]


def test_parts_add_up_and_the_shape_is_any() -> None:
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


def test_values_that_agree_become_zero() -> None:
    values, mask = torch.full((4,), 0.1), torch.ones(4).bool()
    torch.testing.assert_close(whiten(values, mask, moments(values, mask)), torch.zeros(4), rtol=0, atol=1e-9)
    none = torch.zeros(4).bool()
    assert whiten(values, none, moments(values, none)).tolist() == [0.0] * 4
