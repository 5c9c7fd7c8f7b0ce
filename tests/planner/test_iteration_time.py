"""Time of an iteration and of its parts: generation, weight sync, and micro-batches of samples of many lengths."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.tiny_inputs import DENSE, IDEAL, MIXTURE, published, tiny
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, Layout
from verl_mg.models.hf_config import parse_config
from verl_mg.planner.cost import bubble_share, inference_seconds, optimizer_seconds, train_seconds
from verl_mg.planner.efficiency import FITTED
from verl_mg.planner.inputs import AuxiliaryRole, LengthSpread, PlanInputs, packed
from verl_mg.planner.iteration_time import (
    busiest_rank_seconds,
    decode_seconds,
    gathered_bytes,
    iteration_seconds,
    rollout_seconds,
    samples_at_once,
    sync_seconds,
    weight_sync,
)
from verl_mg.planner.memory import TrainMemory, check_engine, rollout_memory, train_memory
from verl_mg.planner.search import pair_of, rollout_side, train_side
from verl_mg.reshard import RankTraffic
from verl_mg.sharding.weight_table import weight_table

GIGA = 10**9
ACTOR = TrainMemory((), {"weights": (2 * GIGA,), "optimizer states": (12 * GIGA,), "gradients": (4 * GIGA,)})
FIRST, LAST, ALL = (0, 1, 2, 3), (4, 5, 6, 7), tuple(range(8))
PARTS = ("rollout", "inference", "update", "sync", "offload", "overhead")


def critic(ranks, offload=False):
    parts = {"weights": (GIGA,), "optimizer states": (6 * GIGA,), "gradients": (2 * GIGA,)}
    return AuxiliaryRole(
        "critic", Layout(), ranks=ranks, offload=offload, parts=parts, update_seconds=30.0, inference_seconds=3.0
    )


def reference(ranks, offload=False):
    parts = {"weights": (GIGA,)}
    return AuxiliaryRole("reference", Layout(), ranks=ranks, offload=offload, parts=parts, inference_seconds=4.0)


def seconds(offload=False, ranks=ALL, auxiliary_roles=()):
    inputs = tiny(
        DENSE, role_ranks=ranks, offload=offload, auxiliary_roles=auxiliary_roles, host=10.0, efficiency=IDEAL
    )
    return iteration_seconds(inputs, ACTOR, inference=5.0, update=20.0, rollout=100.0, sync=1.0)


@pytest.mark.parametrize(
    ("ranks", "roles", "inference", "update"),
    [
        (ALL, (critic(ALL), reference(ALL)), 5 + 3 + 4, 20 + 30),
        (FIRST, (critic(LAST), reference(LAST)), 3 + 4, 30),
        (FIRST, (critic((3, 4, 5, 6)),), 5 + 3, 20 + 30),
    ],
)
def test_iteration_seconds_of_shared_ranks_add_up_there(ranks, roles, inference, update):
    found = seconds(ranks=ranks, auxiliary_roles=roles)
    assert (found.inference, found.update, found.offload) == (inference, update, 0)
    assert found.all == 100 + inference + update + 1


def test_iteration_seconds_offload_counts_copies():
    """10 GB/s. Alone, weights and optimizer states of the actor go and come once, 2 * 14 GB."""
    assert seconds(offload=True).offload == pytest.approx(2.8)
    # Among others, weights go and come after inference, update and sync; those of the reference only come.
    actor, learner = 3 * 2 * 2 + 2 * 12, 2 * 2 * 1 + 2 * 6
    assert seconds(offload=True, auxiliary_roles=(critic(ALL, True),)).offload == pytest.approx((actor + learner) / 10)
    assert seconds(offload=True, auxiliary_roles=(reference(ALL, True),)).offload == pytest.approx((actor + 1) / 10)
    apart = seconds(offload=True, ranks=FIRST, auxiliary_roles=(critic(LAST, True),))
    assert apart.offload == pytest.approx(max(actor, learner) / 10)


@given(st.lists(st.tuples(st.sets(st.integers(0, 7), min_size=1), st.floats(0, 10)), max_size=5))
def test_busiest_rank_seconds_is_between_the_longest_and_the_sum(work):
    found = busiest_rank_seconds(work)
    assert max((s for _, s in work), default=0) <= found + 1e-9 and found <= sum(s for _, s in work) + 1e-9


@pytest.mark.parametrize("text", ["tp1", "pp2-vpp2", "pp4"])
def test_train_seconds_matrix_products_take_three_times_inference(text):
    """A value head has no logits, and links are fast; without pairs of tokens attention takes no time."""
    weights = weight_table(parse_config(DENSE), "value")
    speeds = {"intra_node": 1e12, "inter_node": 1e12, "memory_bandwidth": 1e12}
    work = {"sequence": 32, "micro_batch": 64, "tokens_per_iteration": 1024}
    inputs = PlanInputs(weights, 8, recompute=False, efficiency=replace(IDEAL, attention=1e9), **work, **speeds)
    layout = Layout.parse(text).fit(8)
    update = train_seconds(inputs, layout) - inputs.minibatches * optimizer_seconds(inputs, layout)
    assert update == pytest.approx(3 * inference_seconds(inputs, layout))
    again = replace(inputs, recompute=True)
    difference = train_seconds(again, layout) - train_seconds(inputs, layout)
    assert difference == pytest.approx(inference_seconds(inputs, layout))


def test_inference_seconds_equal_hand_count():
    """8 samples of 32 tokens on 8 ranks at 1 TFLOP/s: 2 FLOPs a weight, and attention's pairs; a bubble of a third.

    The last of two stages is the slowest: it has two of four layers and the output layer.
    """
    fast = {"intra_node": 1e12, "inter_node": 1e12, "memory_bandwidth": 1e12, "efficiency": IDEAL, "flops": 1.0}
    inputs, layout = tiny(DENSE, tokens_per_iteration=256, micro_batch=32, **fast), Layout.parse("pp2").fit(8)
    attention, feed_forward, output = 32 * 8 * (4 + 2 * 2 + 4), 3 * 32 * 64, 64 * 32
    a_micro_batch = 2 * 32 * (2 * (attention + feed_forward) + output) + 2 * 4 * 2 * 8 * 32**2
    assert bubble_share(inputs, layout) == 1 / (2 + 1)
    assert inference_seconds(inputs, layout) == pytest.approx(a_micro_batch / 1e12 * (2 + 1))


def test_pair_of_has_all_parts():
    inputs = tiny(DENSE)
    train = train_side(inputs, Layout.parse("tp2").fit(8))
    pair = pair_of(inputs, train, rollout_side(inputs, EngineLayout(tp=2), train.memory))
    assert pair.parts.inference == train.inference_seconds > 0 and pair.parts.update == train.update_seconds > 0
    assert pair.parts.rollout == pair.rollout.seconds and pair.parts.sync == pair.sync.seconds
    assert pair.seconds == pytest.approx(sum(getattr(pair.parts, name) for name in PARTS))


ENGINE = EngineLayout()


def engine(inputs, layout=ENGINE):
    return rollout_memory(inputs, layout)


def test_decode_seconds_equal_hand_count():
    """100 GB/s: all weights once, and the cache; 4 layers wait for latencies."""
    latencies = {"decode_step": 1e-3, "decode_sample": 1e-5, "decode_layer": 1e-4}
    inputs = tiny(DENSE, memory_bandwidth=100.0, flops=1e6, efficiency=replace(IDEAL, **latencies))
    read = 2 * inputs.size.elements + 100 * 4 * 2 * 2 * 8 * 2
    assert decode_seconds(inputs, ENGINE, engine(inputs), 5, 100) == pytest.approx(read / 1e11 + 1e-3 + 5e-5 + 4 * 1e-4)


@settings(max_examples=20)
@given(st.integers(1, 40), st.floats(0.2, 1.0))
def test_rollout_seconds_equal_a_sum_over_steps(samples, share):
    """One engine, whose samples all begin together: a step for each token of the longest."""
    mean = 8 + share * 24
    inputs = tiny(DENSE, sequence=32, prompt=8, mean_sequence=mean, tokens_per_iteration=round(8 * samples * mean))
    inputs = replace(inputs, flops=1e6)
    memory, spread = engine(inputs), inputs.lengths
    steps = 0.0
    for step in range(24):
        running = max(1.0, samples * spread.unfinished(step + 0.5))
        steps += decode_seconds(inputs, ENGINE, memory, running, running * (8 + step + 0.5))
    assert rollout_seconds(inputs, ENGINE, memory) == pytest.approx(steps, rel=0.05)


def test_rollout_seconds_waiting_samples_take_whole_rounds():
    """Equal lengths: four times as many samples as fit take four times as long."""
    inputs = tiny(DENSE, sequence=32, tokens_per_iteration=32 * 8 * 64, flops=1e6)
    memory = engine(inputs)
    quarter = replace(memory, limit=max(memory.weights) + 16 * 32 * max(memory.per_token))
    assert samples_at_once(inputs, ENGINE, quarter) == 16
    some = rollout_seconds(replace(inputs, tokens_per_iteration=32 * 8 * 16), ENGINE, quarter)
    assert rollout_seconds(inputs, ENGINE, quarter) == pytest.approx(4 * some, rel=0.02)


def test_rollout_seconds_without_waits_for_the_longest_are_shorter():
    usual = published("qwen3_30b_a3b", 16, sequence=4096, mean_sequence=1500)
    steady = replace(usual, batches_in_flight=1)
    memory = engine(usual, EngineLayout(tp=2))
    assert rollout_seconds(steady, EngineLayout(tp=2), memory) < rollout_seconds(usual, EngineLayout(tp=2), memory)


def test_rollout_seconds_smaller_weights_are_faster():
    usual = published("qwen3_30b_a3b", 16)
    fp8 = replace(usual, rollout_bytes=1.0)
    layout = EngineLayout(tp=2)
    assert engine(fp8, layout).weights[0] == pytest.approx(engine(usual, layout).weights[0] / 2, rel=1e-3)
    assert rollout_seconds(fp8, layout, engine(fp8, layout)) < rollout_seconds(usual, layout, engine(usual, layout))


def test_decode_seconds_far_all_reduces_take_longer():
    inputs = tiny(MIXTURE, ranks=16, node=8, efficiency=replace(IDEAL, all_reduce_near=1e-3, all_reduce_far=5e-3))
    near, far = (decode_seconds(inputs, EngineLayout(tp=tp), engine(inputs), 1, 1) for tp in (8, 16))
    assert far - near == pytest.approx(4 * 2 * 4e-3, rel=1e-3)
    assert FITTED.all_reduce_far > FITTED.all_reduce_near


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
    sync = weight_sync(tiny(DENSE), Layout().fit(8), EngineLayout(tp=2))
    assert sum(sync.received) == 0 and sync.seconds == 0


def test_sync_of_quantized_engines_halves_the_bytes_of_layers_and_memory():
    """Values of 1 byte instead of 2 and their scales; embedding and output stay bf16."""
    layouts = Layout.parse("tp4-pp2").fit(8), EngineLayout.parse("tp4")
    wires = ("cast", "fp8_block", "fp8_channel", "mxfp8", "int4")
    plain, blocks, rows, powers, int4 = (published("qwen2_5_7b", 8, wire=wire) for wire in wires)
    every = (sum(weight_sync(inputs, *layouts).received) for inputs in (plain, blocks, rows, powers, int4))
    full, in_blocks, in_rows, in_powers, in_int4 = every
    assert 0.25 * full < in_int4 < 0.45 * full < 0.5 * full < in_blocks < in_rows < in_powers < 0.65 * full
    (most,), (less,), (least,) = (rollout_memory(inputs, layouts[1]).weights for inputs in (plain, blocks, int4))
    assert 0.25 * most < least < 0.45 * most < 0.5 * most < less < 0.65 * most
    assert sum(weight_sync(blocks, *layouts).lower_bound) == in_blocks


def test_engine_layout_or_model_without_such_weights_is_refused():
    with pytest.raises(UserError, match="whole blocks"):
        check_engine(tiny(DENSE, wire="fp8_block"), EngineLayout(tp=2))
    for wire in ("mxfp8", "int4"):
        with pytest.raises(UserError, match=f"rollout.wire={wire}: .* experts .* qwen3_moe has them"):
            check_engine(tiny(MIXTURE, wire=wire), EngineLayout(tp=2))


SPREADS = st.builds(
    lambda prompt, longest, share: LengthSpread(prompt + longest, prompt + share * longest, prompt),
    st.integers(0, 200),
    st.integers(100, 5000),
    st.floats(0.05, 0.98),
)


@given(SPREADS)
def test_mean_and_mean_square_equal_those_of_many_samples(spread):
    power = 1 / spread.exponent
    lengths = [spread.prompt + spread.longest_response * ((n + 0.5) / 4000) ** power for n in range(4000)]
    assert sum(lengths) / 4000 == pytest.approx(spread.mean, rel=0.01)
    assert sum(length**2 for length in lengths) / 4000 == pytest.approx(spread.mean_square, rel=0.01)


@given(SPREADS)
def test_unfinished_samples_add_up_to_the_mean_response(spread):
    """The mean is the sum of the survival function."""
    steps = [(n + 0.5) / 2000 * spread.longest_response for n in range(2000)]
    total = sum(spread.unfinished(step) for step in steps) / 2000 * spread.longest_response
    assert total == pytest.approx(spread.mean_response, rel=0.01)


def test_spread_of_equal_lengths_has_no_tail():
    spread = LengthSpread(100, 100.0, 20)
    assert math.isinf(spread.exponent) and spread.unfinished(79.9) == 1.0 and spread.mean_square == 100**2


def test_packed_equal_rows_equal_hand_count():
    """Three rows of 30 fit 100 tokens; a row longer than that is a micro-batch by itself."""
    assert packed(LengthSpread(30, 30.0), 100).per_sample == 1 / 3
    assert packed(LengthSpread(200, 200.0), 100).per_sample == 1
    assert packed(LengthSpread(30, 30.0), 100).longest_of(8) == 1.0


@given(SPREADS)
def test_packed_micro_batches_have_all_tokens_within_the_budget(spread):
    found, rows = packed(spread, spread.longest), spread.samples()
    assert sum(found.tokens) == sum(rows) and max(found.tokens) <= spread.longest
    assert found.per_sample == len(found.tokens) / len(rows)


@given(SPREADS, st.integers(1, 64))
def test_longest_of_more_ranks_is_longer(spread, count):
    found = packed(spread, spread.longest)
    assert found.longest_of(1) == pytest.approx(1.0)
    assert found.longest_of(count) <= found.longest_of(count + 1) + 1e-9
    assert found.longest_of(10**6) == pytest.approx(max(found.tokens) / (sum(found.tokens) / len(found.tokens)))
