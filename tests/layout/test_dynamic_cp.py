"""Rows assigned to data-parallel ranks: each row once, to neighbours that share it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mg.layout.packing import cp_size_for, plan_by_length, plan_evenly

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@pytest.mark.parametrize("share", [plan_evenly, plan_by_length])
@given(st.lists(st.integers(1, 200), max_size=60), st.integers(1, 4), SIZES, st.integers(8, 120))
def test_plan_micro_batches_each_row_is_on_one_group_of_slots(share, lengths, dp, cp, budget):
    shares = share(lengths, [float(n * n) for n in lengths], dp, cp, budget)
    assert len(shares.rows) == dp * cp and {len(steps) for steps in shares.rows} == {len(shares.cp_sizes)}
    assert shares.cp_sizes and all(cp % context == 0 for context in shares.cp_sizes)
    select_outputs = []
    for seat, steps in enumerate(shares.rows):
        for step, rows in enumerate(steps):
            first = seat // shares.cp_sizes[step] * shares.cp_sizes[step]
            assert rows == shares.rows[first][step] and shares.is_output_rank(seat, step) == (seat == first)
            select_outputs += rows if shares.is_output_rank(seat, step) else []
            space = budget * shares.cp_sizes[step] // cp
            assert len(rows) <= 1 or sum(lengths[row] for row in rows) <= space
    assert sorted(select_outputs) == list(range(len(lengths)))


@given(st.integers(1, 300), SIZES, st.integers(8, 120))
def test_cp_size_for_is_the_smallest_that_fits(length, cp, budget):
    context = cp_size_for(length, cp, budget)
    smaller = [c for c in range(1, context) if cp % c == 0]
    assert cp % context == 0 and all(length > budget * c // cp for c in smaller)
    assert context == cp or length <= budget * context // cp


def test_plan_by_length_shards_only_long_rows():
    shares = plan_by_length([100, 10, 20, 25, 5, 40], [100.0, 10.0, 20.0, 25.0, 5.0, 40.0], 1, 4, 100)
    assert shares.cp_sizes == [4, 2, 1]
    assert [seat[0] for seat in shares.rows] == [[0]] * 4
    assert [seat[1] for seat in shares.rows][::2] == [[5], []] or [seat[1] for seat in shares.rows][::2] == [[], [5]]
    assert sorted(row for seat in shares.rows for row in seat[2]) == [1, 2, 3, 4]
