"""Layout: its text, its fit on a number of ranks, and its grids against Megatron's own rank generator."""

import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mg.errors import UserError
from verl_mg.layout import Layout, ModelDims

SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pp = draw(SIZES)
    sizes = {key: draw(SIZES) for key in ("tp", "cp", "ep", "etp")}
    vpp = draw(SIZES) if pp > 1 else 1
    smallest = Layout(pp=pp, vpp=vpp, **sizes)
    return Layout(pp=pp, vpp=vpp, dp=smallest.dp * draw(SIZES), **sizes)


@given(layouts())
def test_layout_parse_inverts_str(layout):
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("tp1-pp1", "tp1"),
        ("pp2-tp2", "tp2-pp2"),
        ("tp2-pp2-cp1-ep2", "tp2-pp2-ep2"),
        ("tp2-etp2-dp1", "tp2"),
        ("etp1-tp2", "tp2-etp1"),
        ("dp3", "dp3"),
        ("ep2", "ep2"),
        ("ep2-dp2", "ep2"),
        ("ep2-dp4", "ep2-dp4"),
    ],
)
def test_layout_str_is_the_shortest_text(text, canonical):
    assert str(Layout.parse(text)) == canonical


def test_layout_omitted_sizes_have_defaults():
    assert Layout.parse("tp2") == Layout(tp=2) == Layout(tp=2, pp=1, vpp=1, cp=1, ep=1, etp=2, dp=1)
    assert Layout.parse("tp2-pp2-cp1-ep2") == Layout(tp=2, pp=2, ep=2, etp=2, dp=2)


@pytest.mark.parametrize("text", ["", "tp", "tp2-", "tp0", "tp2-xp3", "tp2-tp2", "tp2.5", "tp-2", "TP2", "tp²", "2"])
def test_layout_parse_invalid_text_names_part_and_keys(text):
    with pytest.raises(UserError, match=r"keys are tp, pp, vpp, cp, ep, etp, dp.*as in tp4-pp2-ep8") as caught:
        Layout.parse(text)
    parts = {"tp2-xp3": "'xp3' has an unknown key", "tp2-tp2": "'tp2' gives tp a second time"}
    assert parts.get(text, "") in str(caught.value)


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"tp": -1}, {"dp": -1}, {"vpp": 2}, {"ep": 4, "dp": 2}])
def test_layout_invalid_sizes_are_user_errors(sizes):
    with pytest.raises(UserError):
        Layout(**sizes)


def test_layout_fit_sets_dp():
    fitted = Layout.parse("tp2-pp2").fit(16)
    assert (fitted.dp, fitted.ranks, str(fitted)) == (4, 16, "tp2-pp2-dp4") and fitted.fit(16) == fitted


@given(layouts(), st.integers(1, 200))
def test_layout_fit_agrees_with_division(layout, ranks):
    open_layout = Layout(layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.etp)
    dense, expert = layout.tp * layout.pp * layout.cp, layout.etp * layout.ep * layout.pp
    if ranks % dense == 0 and ranks % expert == 0:
        fitted = open_layout.fit(ranks)
        assert (fitted.dp, fitted.edp, fitted.ranks) == (ranks // dense, ranks // expert, ranks)
    else:
        with pytest.raises(UserError, match=f"multiple of {math.lcm(dense, expert)} ranks, not {ranks}"):
            open_layout.fit(ranks)


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("tp4-pp2", 12, r"layout tp4-pp2 .* not 12\. Start 8 or 16\.$"),
        ("tp4-pp2", 4, r"Start 8\.$"),
        ("ep4", 2, r"not 2\. Start 4\.$"),
        ("tp2", 0, r"not 0\. Start 2\.$"),
        ("tp2-dp4", 6, "dp4 requires 8 ranks, not 6. Start 8, write dp3"),
        ("tp2-dp1", 6, "dp1 requires 2 ranks, not 6"),
        ("tp2-dp4", 7, r"not 7\. Start 8\.$"),
    ],
)
def test_layout_fit_error_names_valid_rank_counts(text, ranks, message):
    with pytest.raises(UserError, match=message):
        Layout.parse(text).fit(ranks)


@settings(max_examples=60)
@given(layouts())
def test_layout_coordinates_equal_megatrons(layout):
    from megatron.core.parallel_state import RankGenerator  # type: ignore[import-untyped]

    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=order)
    expert = RankGenerator(tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1, order=order)
    found = [layout.coordinates(rank) for rank in range(layout.ranks)]
    grids = [
        (dense, {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}),
        (expert, {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}),
    ]
    for generator, names in grids:
        for theirs, ours in names.items():
            for group in generator.get_ranks(theirs):
                assert [getattr(found[rank], ours) for rank in group] == list(range(getattr(layout, ours)))
                others = {tuple(getattr(found[rank], n) for n in names.values() if n != ours) for rank in group}
                assert len(others) == 1


@given(layouts())
def test_layout_rank_of_inverts_coordinates(layout):
    grid = itertools.product(*(range(size) for size in (layout.pp, layout.dp, layout.cp, layout.tp)))
    for rank, (pp, dp, cp, tp) in enumerate(grid):
        assert layout.rank_of(tp, cp, dp, pp) == rank
        at = layout.coordinates(rank)
        assert (at.tp, at.cp, at.dp, at.pp) == (tp, cp, dp, pp)


def test_layout_outside_the_grid_is_index_error():
    layout = Layout(tp=2)
    for rank in (-1, 2):
        with pytest.raises(IndexError):
            layout.coordinates(rank)
    with pytest.raises(IndexError, match="pp index 1"):
        layout.rank_of(pp=1)
    with pytest.raises(IndexError):
        layout.layers(4, pp_rank=1)


@given(SIZES, SIZES, st.integers(0, 30))
def test_layout_layers_remainder_goes_to_the_middle(pp, vpp, more):
    layout = Layout(pp=pp, vpp=vpp if pp > 1 else 1)
    chunks = layout.pp * layout.vpp
    runs = [layout.layers(chunks + more, p, v) for v in range(layout.vpp) for p in range(pp)]
    assert [layer for run in runs for layer in run] == list(range(chunks + more))
    lengths = [len(run) for run in runs]
    assert max(lengths) - min(lengths) <= 1
    assert lengths[-1] == min(lengths)
    short = [n for n, length in enumerate(lengths) if length < max(lengths)]
    from_an_end = sorted(min(n, chunks - 1 - n) for n in short)
    assert from_an_end == sorted(k // 2 for k in range(len(short)))


def test_layout_layers_61_layers_on_16_stages():
    assert [len(Layout(pp=16).layers(61, stage)) for stage in range(16)] == [3, *[4] * 13, 3, 3]


@given(SIZES.filter(lambda pp: pp > 1), SIZES, st.data())
def test_layout_layers_of_chosen_chunks_are_runs_in_order(pp, vpp, data):
    chunks = pp * vpp
    chosen = data.draw(st.lists(st.integers(1, 9), min_size=chunks, max_size=chunks))
    layout = Layout.parse(f"pp{pp}-vpp{vpp}", chosen).fit(2 * pp)
    runs = [layout.layers(sum(chosen), p, v) for v in range(vpp) for p in range(pp)]
    assert [len(run) for run in runs] == chosen
    assert [layer for run in runs for layer in run] == list(range(sum(chosen)))
    assert sum(len(layout.stage(sum(chosen), p).layers) for p in range(pp)) == sum(chosen)


def test_layout_chunks_without_layers_are_the_first_and_the_last():
    layout = Layout(pp=4, pipeline_layers=(0, 3, 3, 0))
    assert [list(layout.layers(6, stage)) for stage in range(4)] == [[], [0, 1, 2], [3, 4, 5], []]
    assert layout.stage(6, 0).is_first and layout.stage(6, 3).is_last


@pytest.mark.parametrize(
    ("text", "chosen", "message"),
    [
        ("pp4", [1, 2, 3], r"\[1, 2, 3\] has length 3, and layout pp4 has 4 pipeline chunks"),
        ("pp2-vpp2", [3, 3], "Write one number for each chunk of pp2-vpp2, in the order of the layers"),
        ("tp2", [6], "layout tp2 has one pipeline stage, with all layers. Leave the key out, or write pp2"),
        ("pp4", [2, 0, 3, 1], "has a chunk without layers. Write 1 or more; 0 is possible for the first"),
        ("pp2", [-1, 7], "has a chunk without layers"),
        ("pp2", [2, 3], r"\[2, 3\] are 5 layers, and the model has 6. Distribute all of them"),
    ],
)
def test_layout_chosen_layers_that_are_not_possible_are_user_errors(text, chosen, message):
    with pytest.raises(UserError, match=f"^pipeline_layers: .*{message}"):
        Layout.parse(text, chosen).layers(6, 0)


QWEN3_30B = {"attention_heads": 32, "kv_heads": 4, "layers": 48, "ffn": 6144, "experts": 128, "expert_ffn": 768}


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        ("tp4", {"attention_heads": 6}, "tp4 does not divide the 6 attention heads. Choose tp from 1, 2, 3, 6."),
        ("tp8", {}, "tp8 does not divide the 4 key-value heads. Choose tp from 1, 2, 4."),
        ("pp49", {}, "49 pipeline chunks are more than the model's 48 layers"),
        ("pp16-vpp4", {}, "pp16-vpp4: 64 pipeline chunks are more than the model's 48 layers"),
        ("tp4", {"ffn": 6}, "columns of the feed-forward"),
        ("ep3", {}, "ep3 does not divide the 128 experts"),
        ("etp5", {}, "etp5 does not divide the 768 columns of an expert"),
        ("ep2", {"experts": 0}, "Leave out ep"),
    ],
)
def test_check_names_the_dimension(text, change, message):
    Layout.parse("tp4-pp4-vpp3-ep8-etp1").check(ModelDims(**QWEN3_30B))
    with pytest.raises(UserError, match=message):
        Layout.parse(text).check(ModelDims(**QWEN3_30B | change))


def test_layout_package_does_not_import_torch():
    program = "import verl_mg.layout, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
