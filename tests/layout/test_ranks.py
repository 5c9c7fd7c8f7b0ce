"""Ranks as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mg.errors import UserError
from verl_mg.layout import format_ranks, parse_ranks


@given(st.sets(st.integers(0, 60), min_size=1))
def test_what_is_written_is_read_back(ranks):
    rising = tuple(sorted(ranks))
    assert parse_ranks(format_ranks(rising)) == rising


def test_runs_and_single_ranks():
    assert parse_ranks("3") == (3,)
    assert parse_ranks("0-3, 8,10-11") == (0, 1, 2, 3, 8, 10, 11)
    assert format_ranks((0, 1, 2, 3, 8, 10, 11)) == "0-3,8,10-11"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is neither a rank nor a range"),
        ("tp2", "'tp2' is neither a rank nor a range"),
        ("0-3,-1", "'-1' is neither"),
        ("3-1", "'3-1' is not in rising order"),
        ("0-3,3", "'3' is not in rising order. Write each rank once"),
    ],
)
def test_what_is_not_understood_is_named(text, words):
    with pytest.raises(UserError, match=words):
        parse_ranks(text)
