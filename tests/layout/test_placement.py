"""Placement: ranks of a job to coordinates of a layout; ranks as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, ModelDims, Placement, format_ranks, parse_ranks
from verl_mg.layout.packing import cp_size_for, plan_by_length, plan_evenly


def test_placement_on_first_ranks_has_layout_coordinates():
    placement = Placement.on(Layout.parse("tp2-pp2"), 8)
    assert placement.ranks == tuple(range(8))
    assert placement.layout.dp == 2
    assert [placement.coordinates(rank) for rank in range(8)] == [placement.layout.coordinates(r) for r in range(8)]
    assert placement.coordinates(8) is None


def test_placement_on_other_ranks_follows_their_order():
    placement = Placement(Layout(tp=2, pp=2), (6, 4, 7, 5))
    assert placement.coordinates(4) == Layout(tp=2, pp=2).coordinates(1)
    assert placement.coordinates(5) == Layout(tp=2, pp=2).coordinates(3)
    assert placement.coordinates(0) is None


def test_placement_equal_placements_hash_equal():
    first, second = Placement.on(Layout(tp=2), 2), Placement(Layout.parse("tp2"), (0, 1))
    assert first.coordinates(1) is not None
    assert {first: "plan"}[second] == "plan"


def test_placement_works_for_ten_thousand_ranks():
    placement = Placement.on(Layout.parse("tp8-pp4-ep16-etp1"), 10_240)
    last = placement.coordinates(10_239)
    assert last is not None and (last.tp, last.pp, last.ep) == (7, 3, 15)


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2), (0, 0), (-1, 0), ()])
def test_placement_invalid_ranks_are_user_errors(ranks):
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


SIZES = st.sampled_from([1, 2, 4])


@given(SIZES, SIZES, st.integers(0, 2), st.integers(0, 2))
def test_engine_layout_parse_inverts_str(tp, pp, ep, adp):
    layout = EngineLayout(tp, pp, min(tp, 2**ep), min(tp, 2**adp))
    assert EngineLayout.parse(str(layout)) == layout


def test_engine_coordinates_follow_sglangs_numbering():
    placement = EnginePlacement(EngineLayout.parse("tp4-pp2-ep2-adp2"), tuple(range(8)))
    at = placement.coordinates(7)
    assert (at.engine, at.pp, at.tp) == (0, 1, 3)
    assert (at.attention_dp, at.attention_tp) == (1, 1)
    # As SGLang numbers them: the ranks of one group of experts are neighbours.
    assert [placement.coordinates(rank).ep for rank in range(4)] == [0, 0, 1, 1]
    assert [placement.coordinates(rank).expert_tp for rank in range(4)] == [0, 1, 0, 1]


@given(SIZES, st.sampled_from([1, 2, 4]), st.integers(1, 2))
def test_engine_placement_every_engine_has_every_member_once(tp, stride, runs):
    ranks = tuple(range(10, 10 + tp * stride * runs))
    placement = EnginePlacement(EngineLayout(tp=tp), ranks, stride)
    seen = {(placement.coordinates(rank).engine, placement.coordinates(rank).tp) for rank in ranks}
    assert seen == {(engine, member) for engine in range(stride * runs) for member in range(tp)}
    assert placement.engines == stride * runs
    first = [rank for rank in ranks if placement.coordinates(rank).engine == 0]
    assert first == list(range(10, 10 + tp * stride, stride))


def test_engine_placement_strides_stay_inside_a_node():
    def strides(layout: str, ranks: int, node: int) -> list[int]:
        placement = EnginePlacement(EngineLayout.parse(layout), tuple(range(ranks)))
        return [candidate.stride for candidate in placement.strides(node)]

    assert strides("tp2", 16, 8) == [1, 2, 4]
    assert strides("tp8", 16, 8) == [1]
    assert strides("tp16", 32, 8) == [1]
    # The last ranks of a job need not begin with a node.
    assert [one.stride for one in EnginePlacement(EngineLayout(tp=2), tuple(range(6, 14))).strides(8)] == [1]
    assert [one.stride for one in EnginePlacement(EngineLayout(tp=2), tuple(range(4, 8))).strides(8)] == [1, 2]


def test_engine_layout_layers_equal_sglangs_stages():
    layout = EngineLayout(pp=4)
    assert [len(layout.layers(61, stage)) for stage in range(4)] == [15, 15, 15, 16]
    assert [layer for stage in range(4) for layer in layout.layers(61, stage)] == list(range(61))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp4-ep3", "ep must divide tp4. Write ep1 or 2 or 4"),
        ("tp4-adp8", "adp must divide tp4"),
        ("tp4-dp2", "'dp2' has an unknown key. Valid keys are tp, pp, ep, adp"),
        ("tp0", "sizes start at 1"),
    ],
)
def test_engine_layout_invalid_text_is_user_error(text, message):
    with pytest.raises(UserError, match=message):
        EngineLayout.parse(text)


def test_engine_placement_wrong_number_of_ranks_is_user_error():
    with pytest.raises(UserError, match="tp4 with stride 2 requires a multiple of 8 ranks, not 4"):
        EnginePlacement(EngineLayout(tp=4), (0, 1, 2, 3), stride=2)
    with pytest.raises(UserError, match="tp is 0. Sizes start at 1"):
        EngineLayout(tp=0)


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        ("tp3", {}, "tp / adp = 3 does not divide the 8 attention heads"),
        ("tp8", {"kv_heads": 3}, "tp / adp = 8 does not divide the 3 key-value heads"),
        ("tp2", {"ffn": 9}, "columns of the feed-forward"),
        ("tp2-ep2", {"experts": 0}, "Leave out ep"),
        ("tp2", {"expert_ffn": 3}, "tp / ep = 2 does not divide the 3 columns of an expert"),
        ("pp9", {}, "more stages than the model's 8 layers"),
    ],
)
def test_check_names_the_dimension(text, change, message):
    model = {"attention_heads": 8, "kv_heads": 2, "layers": 8, "ffn": 16, "experts": 4, "expert_ffn": 8}
    EngineLayout.parse("tp8-ep2").check(ModelDims(**model))  # more ranks than key-value heads: they share
    with pytest.raises(UserError, match=message):
        EngineLayout.parse(text).check(ModelDims(**model | change))


CONTEXT_SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@pytest.mark.parametrize("share", [plan_evenly, plan_by_length])
@given(st.lists(st.integers(1, 200), max_size=60), st.integers(1, 4), CONTEXT_SIZES, st.integers(8, 120))
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


@given(st.integers(1, 300), CONTEXT_SIZES, st.integers(8, 120))
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
