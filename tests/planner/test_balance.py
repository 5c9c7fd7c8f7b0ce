"""Balanced layers of pipeline stages against all that are possible."""

from itertools import combinations

import pytest

from tests.planner.tiny_inputs import published
from verl_mg.layout import Layout
from verl_mg.planner.cost import train_seconds, update_parts, update_seconds_by_stage
from verl_mg.planner.search import balanced, search


@pytest.mark.parametrize(
    ("model", "text"),
    [("qwen2_5_7b", "tp2-pp4"), ("qwen3_30b_a3b", "pp4-ep8"), ("deepseek_v3", "pp2"), ("qwen3_1_7b", "pp3")],
)
def test_balanced_layers_have_the_fastest_slowest_stage(model: str, text: str) -> None:
    layout = Layout.parse(text)
    inputs = published(model, layout.ranks)
    layers, head = update_parts(inputs, layout)
    slowest = []
    for cuts in combinations(range(1, len(layers)), layout.pp - 1):
        ends = zip((0, *cuts), (*cuts, len(layers)), strict=True)
        stages = [sum(layers[first:end]) for first, end in ends]
        slowest.append(max(*stages[:-1], stages[-1] + head))
    even = max(update_seconds_by_stage(inputs, layout))
    found = balanced(inputs, layout)
    if found is None:
        assert min(slowest) > 0.99 * even
        return
    assert max(update_seconds_by_stage(inputs, found)) == pytest.approx(min(slowest), rel=1e-4)
    assert min(slowest) < 0.99 * even and train_seconds(inputs, found) < train_seconds(inputs, layout)


def test_balanced_is_none_without_stages_and_with_several_chunks_of_a_stage() -> None:
    inputs = published("qwen2_5_7b", 8)
    assert balanced(inputs, Layout(dp=8)) is None and balanced(inputs, Layout(pp=2, vpp=2, dp=4)) is None


def test_search_returns_a_layout_once_with_its_best_layers() -> None:
    inputs = published("qwen2_5_32b", 32, memory=48.0)
    pairs = search(inputs, None, None, 8)
    assert len({str(pair.train.layout) for pair in pairs}) == len(pairs)
    chosen = [pair.train for pair in pairs if pair.train.layout.pipeline_layers]
    assert chosen
    for side in chosen:
        assert side.update_seconds < train_seconds(inputs, Layout.parse(str(side.layout)))
