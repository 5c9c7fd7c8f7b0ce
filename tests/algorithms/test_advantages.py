"""Group-relative advantages against loops over groups."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mg.algorithms.advantages import group_relative

ROWS = st.lists(st.tuples(st.floats(-10, 10), st.sampled_from([-3, 0, 1, 2, 700])), min_size=1, max_size=24)


def by_hand(rows: list[tuple[float, int]], normalize_std: bool) -> list[float]:
    advantages = []
    for score, group in rows:
        peers = [other for other, theirs in rows if theirs == group]
        advantage = score - statistics.fmean(peers)
        if normalize_std:
            advantage /= (statistics.stdev(peers) if len(peers) > 1 else 0.0) + 1e-6
        advantages.append(advantage)
    return advantages


@settings(max_examples=100)
@given(ROWS, st.booleans())
def test_against_loops(rows: list[tuple[float, int]], normalize_std: bool) -> None:
    scores = torch.tensor([score for score, _ in rows], dtype=torch.float64)
    groups = torch.tensor([group for _, group in rows])
    expected = torch.tensor(by_hand(rows, normalize_std), dtype=torch.float64)
    torch.testing.assert_close(group_relative(scores, groups, normalize_std), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_row_order_changes_no_bit(normalize_std: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(200, generator=generator)
    groups = torch.randint(0, 17, (200,), generator=generator)
    order = torch.randperm(200, generator=generator)
    advantages = group_relative(scores, groups, normalize_std)
    assert torch.equal(group_relative(scores[order], groups[order], normalize_std), advantages[order])
    assert advantages.abs().max() > 1


def test_input_dtype_and_inputs_are_kept() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 0.0, 5.0]), torch.tensor([4, 4, 4, 9])
    kept = scores.clone()
    advantages = group_relative(scores, groups)
    assert advantages.dtype == torch.float32
    assert torch.equal(scores, kept)
    torch.testing.assert_close(advantages, torch.tensor([1.1547, -0.57735, -0.57735, 0.0]), rtol=1e-4, atol=0)


def test_groups_that_teach_nothing_are_exactly_zero() -> None:
    scores = torch.tensor([0.1, 0.1, 0.1, 7.3])
    assert group_relative(scores, torch.tensor([0, 0, 0, 1])).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_a_large_offset_does_not_swallow_the_spread() -> None:
    scores = torch.tensor([1e6, 1e6 + 1, 1e6, 1e6 + 1])
    torch.testing.assert_close(
        group_relative(scores, torch.zeros(4, dtype=torch.int64)),
        torch.tensor([-1.0, 1.0, -1.0, 1.0]) * 0.75**0.5,
    )


def test_no_rows() -> None:
    assert group_relative(torch.empty(0), torch.empty(0, dtype=torch.int64)).shape == (0,)
