"""Placement: ranks of a job to coordinates of a layout; ranks as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mg.errors import UserError
from verl_mg.layout import Layout, Placement, format_ranks, parse_ranks


def test_placement_on_first_ranks_has_layout_coordinates() -> None:
    placement = Placement.on(Layout.parse("tp2-pp2"), 8)
    assert placement.ranks == tuple(range(8))
    assert placement.layout.dp == 2
    assert [placement.coordinates(rank) for rank in range(8)] == [placement.layout.coordinates(r) for r in range(8)]
    assert placement.coordinates(8) is None


def test_placement_on_other_ranks_follows_their_order() -> None:
    placement = Placement(Layout(tp=2, pp=2), (6, 4, 7, 5))
    assert placement.coordinates(4) == Layout(tp=2, pp=2).coordinates(1)
    assert placement.coordinates(5) == Layout(tp=2, pp=2).coordinates(3)
    assert placement.coordinates(0) is None


def test_placement_equal_placements_hash_equal() -> None:
    first, second = Placement.on(Layout(tp=2), 2), Placement(Layout.parse("tp2"), (0, 1))
    assert first.coordinates(1) is not None
    assert {first: "plan"}[second] == "plan"


def test_placement_works_for_ten_thousand_ranks() -> None:
    placement = Placement.on(Layout.parse("tp8-pp4-ep16-etp1"), 10_240)
    last = placement.coordinates(10_239)
    assert last is not None and (last.tp, last.pp, last.ep) == (7, 3, 15)


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2), (0, 0), (-1, 0), ()])
def test_placement_invalid_ranks_are_user_errors(ranks: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="layout tp2"):
        Placement(Layout(tp=2), ranks)


@given(st.sets(st.integers(0, 60), min_size=1))
def test_parse_ranks_inverts_format_ranks(ranks):
    rising = tuple(sorted(ranks))
    assert parse_ranks(format_ranks(rising)) == rising


def test_parse_ranks_reads_ranges_and_single_ranks():
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
def test_parse_ranks_invalid_text_is_user_error(text, words):
    with pytest.raises(UserError, match=words):
        parse_ranks(text)
