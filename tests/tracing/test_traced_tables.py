"""The tables of SGLang, of vLLM and of `transformers` against their own loaders, element by element."""

from pathlib import Path

import pytest

from tests.helpers.traces import (
    FAMILIES,
    VISION_LAYOUTS,
    folder_of,
    layouts_of,
    needs_sglang,
    needs_vllm,
    nightly_layouts_of,
    sglang_traces,
    vllm_layouts_of,
    vllm_traces,
)
from tests.oracles.transformers_trace import trace_transformers
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.models.hf_config import read_config
from verl_mg.models.transformers_module import checkpoint_shapes
from verl_mg.sharding.boxes import Shard
from verl_mg.sharding.traced_table import TracedTable
from verl_mg.sharding.weight_table import weight_table


@pytest.fixture(scope="module")
def traces():
    with_vision = [(family, layouts[0]) for family, layouts in VISION_LAYOUTS.items()]
    return sglang_traces([(f, layout) for f in FAMILIES for layout in layouts_of(f)] + with_vision)


def comparable(shards: dict[str, Shard]) -> dict[str, object]:
    """Shapes, orders of dimensions, pieces and padding; the order of pieces is irrelevant."""
    return {
        name: (
            shard.shape,
            shard.order,
            sorted((piece.tensor, piece.source, piece.target) for piece in shard.pieces),
            sorted(shard.padding),
        )
        for name, shard in shards.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_huggingface_table_equals_saved_checkpoint(family):
    table = weight_table(read_config(folder_of(family)))
    stacked, ours = table.tensor_index.stacked, {}
    for name, shard in table.huggingface().items():
        place = stacked.get(name)
        ours |= {place.name: place.shape} if place else {name: shard.shape}
    assert ours == checkpoint_shapes(folder_of(family))


@pytest.mark.parametrize("family", [*FAMILIES, *VISION_LAYOUTS])
def test_transformers_table_equals_from_pretrained(family):
    ours, theirs = weight_table(read_config(folder_of(family))).transformers(), trace_transformers(folder_of(family))
    assert comparable(ours) == comparable(of_language_model(theirs) if family in VISION_LAYOUTS else theirs)


@needs_sglang
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_sglang_table_equals_load_weights(traces, family):
    assert_table_equals({layout: traces[family, layout] for layout in layouts_of(family)}, family)


def of_language_model(shards: dict[str, Shard]) -> dict[str, Shard]:
    towers = {name for name, s in shards.items() if all(p.tensor.startswith("model.visual.") for p in s.pieces)}
    assert towers
    return {name: shard for name, shard in shards.items() if name not in towers}


@needs_sglang
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", VISION_LAYOUTS)
def test_sglang_table_of_a_language_model_equals_load_weights(traces, family):
    layout, *_ = VISION_LAYOUTS[family]
    ranks = traces[family, layout]
    assert_table_equals({layout: list(map(of_language_model, ranks))}, family)
    table = weight_table(read_config(folder_of(family))).for_engine("sglang")
    given = TracedTable("", "sglang", "", layout, tuple(ranks))
    placement = EnginePlacement(layout, tuple(range(layout.ranks)))
    found = table.with_traced(given, Path("table.json")).shard_map_engine(placement)
    assert all(found.shards(rank) == of_language_model(shards) for rank, shards in enumerate(ranks))


@needs_sglang
@pytest.mark.nightly
def test_sglang_table_of_a_language_model_in_further_layouts_equals_load_weights():
    traced = sglang_traces([(family, layout) for family, layouts in VISION_LAYOUTS.items() for layout in layouts[1:]])
    for (family, layout), ranks in traced.items():
        assert_table_equals({layout: list(map(of_language_model, ranks))}, family)


@needs_sglang
@pytest.mark.nightly
@pytest.mark.parametrize("family", [family for family in FAMILIES if nightly_layouts_of(family)])
def test_sglang_table_of_further_layouts_equals_load_weights(family):
    traced = sglang_traces([(family, layout) for layout in nightly_layouts_of(family)])
    assert_table_equals({layout: ranks for (_, layout), ranks in traced.items()}, family)


@needs_vllm
@pytest.mark.timeout(600)
def test_vllm_table_equals_load_weights():
    """What differs from SGLang: names of experts and latent attention, and the ends of the pipeline."""
    traced = vllm_traces([
        ("llama", EngineLayout(pp=2)),
        ("qwen2_tied", EngineLayout(pp=2)),
        ("gemma2", EngineLayout(pp=2)),
        ("qwen3_moe", EngineLayout(tp=2)),
        ("mixtral", EngineLayout(pp=2)),
        ("deepseek_v3", EngineLayout(tp=2, ep=2)),
        ("deepseek_v32", EngineLayout(tp=2)),
        ("gpt_oss", EngineLayout(tp=2)),
    ])  # fmt: skip
    for (family, layout), ranks in traced.items():
        assert_table_equals({layout: ranks}, family, "vllm")


@needs_vllm
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", [family for family in FAMILIES if vllm_layouts_of(family)])
def test_vllm_table_of_all_layouts_equals_load_weights(family):
    traced = vllm_traces([(family, layout) for layout in vllm_layouts_of(family)])
    assert_table_equals({layout: ranks for (_, layout), ranks in traced.items()}, family, "vllm")


def assert_table_equals(traced, family, engine="sglang"):
    """Each rank's shards of the table are those of {layout: shards of each rank}, which use all tensors."""
    weights = weight_table(read_config(folder_of(family))).for_engine(engine)
    names = weights.tensor_index.tensors.keys()
    assert traced
    for layout, ranks in traced.items():
        assert len(ranks) == layout.ranks
        for rank, shards in enumerate(ranks):
            assert comparable(weights.engine_shards(layout, rank)) == comparable(shards), (str(layout), rank)
        used = {piece.tensor for shards in ranks for shard in shards.values() for piece in shard.pieces}
        assert used == names, str(layout)
