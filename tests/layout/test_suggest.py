"""Suggestions: all of them work, none is nearer, and they come in one line."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, Layout, ModelDims
from verl_mg.layout.suggest import (
    distance,
    engine_layouts_on,
    format_layout,
    format_suggestions,
    is_valid,
    layouts_on,
    nearest,
    resolve_engine_layout,
    resolve_layout,
)

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])
RANKS = st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24])


@st.composite
def models(draw: st.DrawFn) -> ModelDims:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    experts = draw(st.sampled_from([0, 4, 6, 8]))
    return ModelDims(
        attention_heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        layers=draw(st.integers(1, 12)),
        ffn=48,
        experts=experts,
        expert_ffn=24 if experts else 0,
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pp = draw(SIZES)
    tp, cp, ep, etp = (draw(SIZES) for _ in range(4))
    return Layout(tp, pp, draw(SIZES) if pp > 1 else 1, cp, ep, etp)


@st.composite
def engines(draw: st.DrawFn) -> EngineLayout:
    tp = draw(SIZES)
    divisors = st.sampled_from([size for size in (1, 2, 3, 4, 6, 8) if tp % size == 0])
    return EngineLayout(tp, draw(SIZES), draw(divisors), draw(divisors))


def check(model: ModelDims, layout: Layout) -> None:
    layout.check(model)
    layout.check_context(model.attention_heads)


def suggested(message: str) -> list[str]:
    found = re.search(r" Nearest valid layouts on \d+ ranks: (.*)\.$", message)
    return found[1].split(", ") if found else []


@given(layouts(), RANKS, models())
def test_resolve_layout_suggestions_are_valid(layout, ranks, model):
    try:
        assert resolve_layout(layout, ranks, model.experts, lambda fitted: check(model, fitted)).ranks == ranks
    except UserError as error:
        assert str(error).count("\n") == 0
        names = suggested(str(error))
        assert names or "No other layout is valid" in str(error)
        for name in names:
            check(model, Layout.parse(name).fit(ranks))
        # One rank after the other holds all of a model: there is always this one.
        assert names, "dp alone always works"


@given(layouts(), RANKS, models())
def test_nearest_returns_the_nearest_valid_layouts(layout, ranks, model):
    candidates = list(layouts_on(ranks, model.experts, layout))
    found = nearest(layout, candidates, lambda other: check(model, other))
    others = [other for other in candidates if other not in found and is_valid(other, lambda o: check(model, o))]
    assert found == nearest(layout, reversed(candidates), lambda other: check(model, other))
    assert len(found) == 3 or not others
    assert all(distance(layout, far) >= distance(layout, found[-1]) - 1e-6 for far in others)


@given(engines(), RANKS, models())
def test_resolve_engine_layout_suggestions_are_valid(layout, ranks, model):
    try:
        resolve_engine_layout(layout, ranks, model.experts, lambda other: other.check(model))
    except UserError as error:
        names = suggested(str(error))
        assert names, "engines of one rank always work"
        for name in names:
            EngineLayout.parse(name).check(model)
            assert ranks % EngineLayout.parse(name).ranks == 0


@given(RANKS, st.sampled_from([0, 4, 6]), layouts())
def test_layouts_on_are_distinct_and_use_all_ranks(ranks, experts, up_to):
    found = list(layouts_on(ranks, experts, up_to))
    assert found and len(set(found)) == len(found)
    for layout in found:
        assert layout.ranks == ranks and layout.cp <= up_to.cp and layout.vpp <= up_to.vpp
        assert max(experts, 1) % layout.ep == 0 and layout.etp in (
            (1, layout.tp, up_to.etp) if experts else (layout.tp,)
        )
    serving = list(engine_layouts_on(ranks, experts))
    assert all(ranks % layout.ranks == 0 for layout in serving) and len(set(serving)) == len(serving)


QWEN3_30B = ModelDims(attention_heads=32, kv_heads=4, layers=48, ffn=6144, experts=128, expert_ffn=768)


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        (
            "tp8-pp2",
            16,
            "layout tp8-pp2: tp8 does not divide the 4 key-value heads. Choose tp from 1, 2, 4. "
            "Nearest valid layouts on 16 ranks: tp4-pp2, tp2-pp2, tp4",
        ),
        (
            "tp3",
            8,
            "layout tp3 requires a multiple of 3 ranks, not 8. Start 6 or 9. Nearest valid layouts on 8 ranks: ",
        ),
        ("tp2-dp3", 8, "layout tp2-dp3: dp3 requires 6 ranks, not 8. Start 6, write dp4, or leave out dp. "),
        ("ep256", 256, "layout ep256: ep256 does not divide the 128 experts. "),
        ("pp64", 64, "layout pp64: 64 pipeline chunks are more than the model's 48 layers. "),
        ("tp4-cp16", 64, "layout tp4-cp16: tp4-cp16 does not divide the 32 attention heads. "),
    ],
)
def test_resolve_layout_error_is_one_line_with_suggestions(text, ranks, message):
    with pytest.raises(UserError) as error:
        resolve_layout(Layout.parse(text), ranks, 128, lambda fitted: check(QWEN3_30B, fitted))
    assert str(error.value).startswith(message)


def test_distance_counts_doublings():
    assert distance(Layout(tp=8, pp=2), Layout(tp=2)) == 2 + 1 == distance(Layout(tp=8, pp=2), Layout(tp=4, etp=2))
    assert distance(EngineLayout(tp=8), EngineLayout(tp=4, ep=2)) == 2
    assert format_suggestions([], 3) == "No other layout is valid on 3 ranks."
    assert format_layout(Layout.parse("tp2-ep4").fit(16)) == "tp2-ep4"
