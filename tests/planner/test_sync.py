"""The weight sync on paper."""

import pytest

from tests.planner.tiny_inputs import DENSE, MIXTURE, published, tiny
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, Layout
from verl_mg.planner.iteration_time import gathered_bytes, sync_seconds, weight_sync
from verl_mg.planner.memory import check_engine, rollout_memory, train_memory
from verl_mg.reshard import RankTraffic


def test_sync_seconds_is_that_of_the_slowest_rank():
    """100 GB from other nodes at 50 GB/s and 200 from its own at 400; then a rank that sends more than it receives."""
    giga = 10**9
    traffic = {0: RankTraffic(received=300 * giga, entered=100.0 * giga), 1: RankTraffic(received=8 * giga)}
    assert sync_seconds(traffic, 400, 50) == pytest.approx(2.5)
    traffic[1].sent = 1200.0 * giga
    assert sync_seconds(traffic, 400, 50) == pytest.approx(3.0)


def test_gathered_bytes_is_model_minus_local_shards():
    inputs, layout = tiny(DENSE), Layout.parse("tp2-pp2").fit(8)
    memory = train_memory(inputs, layout)
    assert gathered_bytes(inputs, memory) == tuple(2 * inputs.size.elements - held for held in memory.parts["weights"])
    assert gathered_bytes(inputs, train_memory(inputs, Layout().fit(8))) == (0,)


@pytest.mark.parametrize("node", [2, 8])
def test_weight_sync_receives_lower_bound_and_less_than_gathering(node):
    inputs, layout = tiny(MIXTURE, node=node), Layout.parse("tp2-pp2-ep2").fit(8)
    sync = weight_sync(inputs, layout, EngineLayout.parse("tp4-ep4"))
    assert sync.received == sync.lower_bound and len(sync.received) == 8 and len(sync.entered) == 8 // node
    assert max(sync.received) < max(gathered_bytes(inputs, train_memory(inputs, layout)))
    assert (sum(sync.entered) == 0) == (node == 8)
    assert (sync.share_between_nodes == 0) == (node == 8) and sync.share_between_nodes <= 1
    assert sync.seconds > 0


def test_weight_sync_equal_shards_move_nothing():
    """Data-parallel ranks that hold everything feed engines of any shape."""
    sync = weight_sync(tiny(DENSE), Layout().fit(8), EngineLayout(tp=2))
    assert sum(sync.received) == 0 and sync.seconds == 0


def test_sync_seconds_shrink_with_faster_links():
    layouts = Layout.parse("tp2-pp2-ep2").fit(8), EngineLayout.parse("tp4-ep4")
    slow, fast = (weight_sync(tiny(MIXTURE, node=2, inter_node=speed), *layouts) for speed in (10.0, 100.0))
    assert slow.seconds > fast.seconds and slow.received == fast.received


def test_sync_of_quantized_engines_halves_the_bytes_of_layers_and_memory():
    """Values of 1 byte instead of 2 and a float32 scale for each block or row; embedding and output stay bf16."""
    layouts = Layout.parse("tp4-pp2").fit(8), EngineLayout.parse("tp4")
    wires = ("cast", "fp8_block", "fp8_channel", "int4")
    plain, blocks, rows, int4 = (published("qwen2_5_7b", 8, wire=wire) for wire in wires)
    every = (sum(weight_sync(inputs, *layouts).received) for inputs in (plain, blocks, rows, int4))
    full, in_blocks, in_rows, in_int4 = every
    assert 0.25 * full < in_int4 < 0.45 * full < 0.5 * full < in_blocks < in_rows < 0.65 * full
    (most,), (less,), (least,) = (rollout_memory(inputs, layouts[1]).weights for inputs in (plain, blocks, int4))
    assert 0.25 * most < least < 0.45 * most < 0.5 * most < less < 0.65 * most
    assert sum(weight_sync(blocks, *layouts).lower_bound) == in_blocks


def test_engine_layout_or_model_without_such_weights_is_refused():
    with pytest.raises(UserError, match="whole blocks"):
        check_engine(tiny(DENSE, wire="fp8_block"), EngineLayout(tp=2))
    with pytest.raises(UserError, match="rollout.wire=int4: .* experts .* qwen3_moe has them"):
        check_engine(tiny(MIXTURE, wire="int4"), EngineLayout(tp=2))
