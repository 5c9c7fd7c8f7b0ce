"""Placement: ranks of a job to coordinates of a layout, and back."""

import pytest

from verl_mg.errors import UserError
from verl_mg.layout import Layout, Placement


def test_on_the_first_ranks() -> None:
    placement = Placement.on(Layout.parse("tp2-pp2"), 8)
    assert placement.ranks == tuple(range(8))
    assert placement.layout.dp == 2
    assert [placement.coordinates(rank) for rank in range(8)] == [placement.layout.coordinates(r) for r in range(8)]
    assert placement.coordinates(8) is None


def test_on_ranks_elsewhere_and_in_another_order() -> None:
    placement = Placement(Layout(tp=2, pp=2), (6, 4, 7, 5))
    assert placement.coordinates(4) == Layout(tp=2, pp=2).coordinates(1)
    assert placement.coordinates(5) == Layout(tp=2, pp=2).coordinates(3)
    assert placement.coordinates(0) is None


def test_equal_placements_are_one_key() -> None:
    one, other = Placement.on(Layout(tp=2), 2), Placement(Layout.parse("tp2"), (0, 1))
    assert one.coordinates(1) is not None
    assert {one: "plan"}[other] == "plan"


def test_ten_thousand_ranks() -> None:
    placement = Placement.on(Layout.parse("tp8-pp4-ep16-etp1"), 10_240)
    last = placement.coordinates(10_239)
    assert last is not None and (last.tp, last.pp, last.ep) == (7, 3, 15)


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2), (0, 0), (-1, 0), ()])
def test_ranks_that_do_not_make_the_layout(ranks: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="layout tp2"):
        Placement(Layout(tp=2), ranks)
