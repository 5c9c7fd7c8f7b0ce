"""The search: what it tries, that it fits, and in which order it comes."""

from itertools import combinations

import pytest

from tests.planner.tiny_inputs import DENSE, MIXTURE, published, tiny
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, Layout
from verl_mg.layout.suggest import format_layout
from verl_mg.planner.cost import bubble_share, stage_seconds, train_seconds, update_parts
from verl_mg.planner.iteration_time import rollout_seconds
from verl_mg.planner.memory import rollout_memory, train_memory
from verl_mg.planner.memory_phases import problem
from verl_mg.planner.search import (
    balanced,
    check_rollout,
    nearest_rollout,
    nearest_train,
    recomputations,
    rollout_layouts,
    search,
    train_layouts,
)


def test_train_layouts_respects_nodes_and_interleaving():
    inputs = tiny(MIXTURE, node=4)
    trains, rollouts = list(train_layouts(inputs)), list(rollout_layouts(inputs))
    assert all(layout.ranks == 8 and layout.tp <= 2 and layout.etp in (1, layout.tp) for layout in trains)
    assert {format_layout(layout) for layout in trains} >= {"tp1", "tp2-pp4", "tp2-ep8-etp1", "pp2-ep2"}
    assert {str(layout) for layout in rollouts} >= {"tp1", "tp4-ep4", "tp4-adp4", "tp4-ep2-adp4"}
    assert len(set(map(str, trains))) == len(trains) and len(set(map(str, rollouts))) == len(rollouts)
    assert all(layout.ep == 1 and layout.etp == layout.tp for layout in train_layouts(tiny(DENSE)))


@pytest.mark.nightly
def test_search_returns_fitting_pairs_best_first():
    inputs = published("qwen3_30b_a3b", 16)
    pairs = search(inputs, None, None, 3)
    assert len(pairs) == 3 and len({pair.train.layout for pair in pairs}) == 3
    assert [pair.seconds for pair in pairs] == sorted(pair.seconds for pair in pairs)
    for pair in pairs:
        assert problem(inputs, pair.train.memory, pair.rollout.memory) is None
        assert pair.seconds == pair.parts.all >= pair.train.update_seconds + pair.rollout.seconds + pair.sync.seconds
    best = pairs[0].train.update_seconds
    for layout in (layout for layout in train_layouts(inputs) if layout.cp == layout.vpp == 1):
        fits = problem(inputs, train_memory(inputs, layout), pairs[0].rollout.memory) is None
        assert not fits or train_seconds(inputs, layout) >= best


def test_search_keeps_given_side():
    inputs = published("qwen3_30b_a3b", 16)
    train, rollout = Layout.parse("tp2-pp2-ep4").fit(16), EngineLayout.parse("tp4-ep4")
    assert {pair.rollout.layout for pair in search(inputs, None, rollout, 2)} == {rollout}
    pairs = search(inputs, train, None, 3)
    assert {pair.train.layout for pair in pairs} == {train} and len({pair.rollout.layout for pair in pairs}) == 3
    (only,) = search(inputs, train, rollout, 3)
    assert (only.train.layout, only.rollout.layout) == (train, rollout)


def test_search_engine_spans_nodes_only_if_needed():
    inputs = published("llama_3_1_405b", 128)
    assert {pair.rollout.layout.tp for pair in search(inputs, None, None, 2)} == {16}


def test_search_engine_spans_more_nodes_if_training_needs_memory():
    """810 GB of weights over 16 ranks are 47 GiB, beside 54 GiB of the actor in the sync."""
    (pair,) = search(published("llama_3_1_405b", 128, offload=False), None, None, 1)
    assert pair.rollout.layout.tp > 16


def test_check_rollout_engine_with_unequal_parts_on_nodes_raises():
    with pytest.raises(UserError, match="an engine over 2 nodes of 3 ranks needs as many"):
        check_rollout(tiny(DENSE, ranks=12, node=3), EngineLayout(tp=4))
    assert check_rollout(tiny(DENSE, ranks=12, node=2), EngineLayout(tp=4)) == EngineLayout(tp=4)


def test_search_without_fitting_layout_raises():
    with pytest.raises(UserError, match="no layout of training fits 74 GiB on 8 ranks. Use more"):
        search(published("qwen3_30b_a3b", 8, micro_batch=10**6, memory=80), None, EngineLayout(tp=4), 1)
    with pytest.raises(UserError, match="no layout of generation fits"):
        search(published("llama_3_1_405b", 8), None, None, 1)


@pytest.mark.parametrize(
    "text",
    [
        "tp8-pp4-ep8",
        "tp4-pp3-ep8",
        *(pytest.param(text, marks=pytest.mark.nightly) for text in ("tp4-pp4", "tp4-pp4-ep8-cp2")),
    ],
)
def test_nearest_layouts_fit_into_memory(text):
    inputs = published("qwen3_235b_a22b", 256)
    near = nearest_train(inputs, Layout.parse(text))
    assert near
    for other in near:
        assert problem(inputs, train_memory(inputs, other), None) is None


def test_nearest_layout_comes_first():
    inputs = published("qwen3_235b_a22b", 256)
    assert format_layout(nearest_train(inputs, Layout.parse("tp8-pp4-ep8"))[0]) == "tp4-pp4-ep8"
    assert str(nearest_rollout(inputs, EngineLayout(tp=4))[0]) == "tp8"
    assert nearest_train(published("llama_3_1_405b", 8), Layout(tp=8)) == []


def test_recomputations_have_modules_that_the_model_has():
    dense, mixture, latent = (published(name, 8) for name in ("qwen3_1_7b", "qwen3_30b_a3b", "deepseek_v3"))
    assert recomputations(dense) == [False, ("layernorm",), ("layernorm", "mlp"), True]
    assert recomputations(mixture) == [False, ("layernorm", "moe_act"), ("layernorm", "moe"), True]
    assert recomputations(latent)[2] == ("layernorm", "mla_up_proj", "mlp", "moe")


def test_search_recomputes_as_little_as_fits():
    layout, engine = Layout.parse("tp2").fit(8), EngineLayout(tp=2)
    found = []
    for memory in (141.0, 73.0, 60.0, 46.0):
        inputs = published("qwen2_5_7b", 8, memory=memory, micro_batch=16384)
        (pair,) = search(inputs, layout, engine, 1, recomputations(inputs))
        assert problem(inputs, pair.train.memory, pair.rollout.memory) is None
        found.append(pair.train)
    assert [side.recompute for side in found] == [False, ("layernorm",), ("layernorm", "mlp"), True]
    assert sorted(side.update_seconds for side in found) == [side.update_seconds for side in found]


def test_bubble_share_shrinks_with_micro_batches_and_interleaving():
    inputs = published("llama_3_1_405b", 256)
    plain, interleaved = Layout.parse("tp8-pp8").fit(256), Layout.parse("tp8-pp8-vpp4").fit(256)
    assert bubble_share(inputs, plain) == 7 / (128 + 7)  # 4 Mi tokens, dp 4, 8192 tokens each
    assert bubble_share(inputs, interleaved) == 7 / (4 * 128 + 7)
    assert bubble_share(inputs, Layout.parse("tp8").fit(256)) == 0
    assert train_seconds(inputs, interleaved) < train_seconds(inputs, plain)


def test_train_seconds_grow_with_slower_links():
    near, far = (published("qwen3_30b_a3b", 16, node=node) for node in (8, 1))
    layout = Layout.parse("tp4-ep4-etp1").fit(16)
    assert train_seconds(near, layout) < train_seconds(far, layout)
    engine = EngineLayout(tp=4)
    memory = rollout_memory(near, engine)
    assert rollout_seconds(near, engine, memory) < rollout_seconds(far, engine, memory)


@pytest.mark.parametrize(
    ("model", "text"),
    [("qwen2_5_7b", "tp2-pp4"), ("qwen3_30b_a3b", "pp4-ep8"), ("deepseek_v3", "pp2"), ("qwen3_1_7b", "pp3")],
)
def test_balanced_layers_have_the_fastest_slowest_stage(model, text):
    layout = Layout.parse(text)
    inputs = published(model, layout.ranks)
    layers, head = update_parts(inputs, layout)
    slowest = []
    for cuts in combinations(range(1, len(layers)), layout.pp - 1):
        ends = zip((0, *cuts), (*cuts, len(layers)), strict=True)
        stages = [sum(layers[first:end]) for first, end in ends]
        slowest.append(max(*stages[:-1], stages[-1] + head))
    even = max(stage_seconds(inputs, layout))
    found = balanced(inputs, layout)
    if found is None:
        assert min(slowest) > 0.99 * even
        return
    assert max(stage_seconds(inputs, found)) == pytest.approx(min(slowest), rel=1e-4)
    assert min(slowest) < 0.99 * even and train_seconds(inputs, found) < train_seconds(inputs, layout)


def test_balanced_is_none_without_stages_and_with_several_chunks_of_a_stage():
    inputs = published("qwen2_5_7b", 8)
    assert balanced(inputs, Layout(dp=8)) is None and balanced(inputs, Layout(pp=2, vpp=2, dp=4)) is None


def test_search_returns_a_layout_once_with_its_best_layers():
    inputs = published("qwen2_5_32b", 32, memory=48.0)
    pairs = search(inputs, None, None, 8)
    assert len({str(pair.train.layout) for pair in pairs}) == len(pairs)
    chosen = [pair.train for pair in pairs if pair.train.layout.pipeline_layers]
    assert chosen
    for side in chosen:
        assert side.update_seconds < train_seconds(inputs, Layout.parse(str(side.layout)))
