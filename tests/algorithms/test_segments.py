"""Sums over ids against a loop, with their gradient."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mg.algorithms.segments import segment_sums, segment_totals


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(-9, 9), st.sampled_from([-5, 0, 1, 3])), max_size=12))
def test_segment_totals_of_random_ids_equal_loops(entries: list[tuple[float, int]]) -> None:
    values = torch.tensor([value for value, _ in entries], dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([number for _, number in entries], dtype=torch.int64)
    found = segment_totals(values, ids)
    expected = [sum(value for value, other in entries if other == number) for _, number in entries]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    found.square().sum().backward()
    shares = [sum(other == number for _, other in entries) for _, number in entries]
    slopes = [2 * total * share for total, share in zip(expected, shares, strict=True)]
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor(slopes, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_segments_and_counts_of_bools() -> None:
    assert segment_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 1])).tolist() == [3.0, 4.0]
    assert segment_totals(torch.tensor([True, True, False]), torch.tensor([9, 2, 9])).tolist() == [1.0, 1.0, 1.0]
