"""SGLang's layouts and the ranks of their engines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement, ModelDims

SIZES = st.sampled_from([1, 2, 4])


@given(SIZES, SIZES, st.integers(0, 2), st.integers(0, 2))
def test_engine_layout_parse_inverts_str(tp: int, pp: int, ep: int, adp: int) -> None:
    layout = EngineLayout(tp, pp, min(tp, 2**ep), min(tp, 2**adp))
    assert EngineLayout.parse(str(layout)) == layout


def test_engine_coordinates_follow_sglangs_numbering() -> None:
    placement = EnginePlacement(EngineLayout.parse("tp4-pp2-ep2-adp2"), tuple(range(8)))
    at = placement.coordinates(7)
    assert (at.engine, at.pp, at.tp) == (0, 1, 3)
    assert (at.attention_dp, at.attention_tp) == (1, 1)
    # As SGLang numbers them: the ranks of one group of experts are neighbours.
    assert [placement.coordinates(rank).ep for rank in range(4)] == [0, 0, 1, 1]
    assert [placement.coordinates(rank).expert_tp for rank in range(4)] == [0, 1, 0, 1]


@given(SIZES, st.sampled_from([1, 2, 4]), st.integers(1, 2))
def test_engine_placement_every_engine_has_every_member_once(tp: int, stride: int, runs: int) -> None:
    ranks = tuple(range(10, 10 + tp * stride * runs))
    placement = EnginePlacement(EngineLayout(tp=tp), ranks, stride)
    seen = {(placement.coordinates(rank).engine, placement.coordinates(rank).tp) for rank in ranks}
    assert seen == {(engine, member) for engine in range(stride * runs) for member in range(tp)}
    assert placement.engines == stride * runs
    first = [rank for rank in ranks if placement.coordinates(rank).engine == 0]
    assert first == list(range(10, 10 + tp * stride, stride))


def test_engine_placement_strides_stay_inside_a_node() -> None:
    def strides(layout: str, ranks: int, node: int) -> list[int]:
        placement = EnginePlacement(EngineLayout.parse(layout), tuple(range(ranks)))
        return [candidate.stride for candidate in placement.strides(node)]

    assert strides("tp2", 16, 8) == [1, 2, 4]
    assert strides("tp8", 16, 8) == [1]
    assert strides("tp16", 32, 8) == [1]
    # The last ranks of a job need not begin with a node.
    assert [one.stride for one in EnginePlacement(EngineLayout(tp=2), tuple(range(6, 14))).strides(8)] == [1]
    assert [one.stride for one in EnginePlacement(EngineLayout(tp=2), tuple(range(4, 8))).strides(8)] == [1, 2]


def test_engine_layout_layers_equal_sglangs_stages() -> None:
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
def test_engine_layout_invalid_text_is_user_error(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        EngineLayout.parse(text)


def test_engine_placement_wrong_number_of_ranks_is_user_error() -> None:
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
def test_check_names_the_dimension(text: str, change: dict[str, int], message: str) -> None:
    model = {"attention_heads": 8, "kv_heads": 2, "layers": 8, "ffn": 16, "experts": 4, "expert_ffn": 8}
    EngineLayout.parse("tp8-ep2").check(ModelDims(**model))  # more ranks than key-value heads: they share
    with pytest.raises(UserError, match=message):
        EngineLayout.parse(text).check(ModelDims(**model | change))
