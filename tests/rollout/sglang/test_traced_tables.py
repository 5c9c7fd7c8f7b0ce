"""The tables of SGLang and of `transformers` against their own loaders, element by element."""

import pytest

from tests.oracles.transformers_trace import trace_transformers
from tests.traces import FAMILIES, folder_of, layouts_of, needs_sglang, sglang_traces
from verl_mg.models.hf_config import read_config
from verl_mg.rollout.sglang.tracing.tracer import checkpoint_shapes
from verl_mg.sharding.boxes import Shard
from verl_mg.sharding.weight_table import weight_table


@pytest.fixture(scope="module")
def traces():
    return sglang_traces([(family, layout) for family in FAMILIES for layout in layouts_of(family)])


def comparable(shards: dict[str, Shard]) -> dict[str, object]:
    """Shapes, pieces and padding; the order of pieces is irrelevant."""
    return {
        name: (
            shard.shape,
            sorted((piece.tensor, piece.source, piece.target) for piece in shard.pieces),
            sorted(shard.padding),
        )
        for name, shard in shards.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_huggingface_table_equals_saved_checkpoint(family):
    ours = weight_table(read_config(folder_of(family))).huggingface()
    assert {name: shard.shape for name, shard in ours.items()} == checkpoint_shapes(folder_of(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_table_equals_from_pretrained(family):
    ours = weight_table(read_config(folder_of(family))).transformers()
    assert comparable(ours) == comparable(trace_transformers(folder_of(family)))


@needs_sglang
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_sglang_table_equals_load_weights(traces, family):
    weights, layouts = weight_table(read_config(folder_of(family))), layouts_of(family)
    assert family == "uneven" or {(layout.tp, layout.ep) for layout in layouts} >= {(1, 1), (2, 1), (4, 1)}
    names = checkpoint_shapes(folder_of(family)).keys()
    for layout in layouts:
        traced = traces[family, layout]
        assert len(traced) == layout.ranks
        for rank, shards in enumerate(traced):
            assert comparable(weights.sglang(layout, rank)) == comparable(shards), (str(layout), rank)
        used = {piece.tensor for shards in traced for shard in shards.values() for piece in shard.pieces}
        assert used == names, str(layout)
