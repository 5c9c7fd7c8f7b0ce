"""Seconds of an iteration, by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.tiny_inputs import DENSE, IDEAL, MIXTURE, published, tiny
from verl_mg.layout import EngineLayout, Layout
from verl_mg.models.hf_config import parse_config
from verl_mg.planner.cost import bubble_share, inference_seconds, optimizer_seconds, train_seconds
from verl_mg.planner.inputs import AuxiliaryRole, PlanInputs
from verl_mg.planner.iteration_time import busiest_rank_seconds, iteration_seconds
from verl_mg.planner.memory import TrainMemory
from verl_mg.planner.search import pair_of, rollout_side, train_side
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


def test_iteration_seconds_same_ranks_add_up():
    found = seconds(auxiliary_roles=(critic(ALL), reference(ALL)))
    assert (found.inference, found.update, found.offload) == (5 + 3 + 4, 20 + 30, 0)
    assert found.all == 100 + 12 + 50 + 1


def test_iteration_seconds_disjoint_ranks_take_the_maximum():
    found = seconds(ranks=FIRST, auxiliary_roles=(critic(LAST), reference(LAST)))
    assert (found.inference, found.update) == (3 + 4, 30)


def test_iteration_seconds_shared_ranks_add_up_there():
    found = seconds(ranks=FIRST, auxiliary_roles=(critic((3, 4, 5, 6)),))
    assert (found.inference, found.update) == (5 + 3, 20 + 30)


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
    assert train_seconds(again, layout) - train_seconds(inputs, layout) == pytest.approx(
        inference_seconds(inputs, layout)
    )


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


def test_train_and_rollout_seconds_shrink_with_faster_hardware():
    slow, fast = (published("qwen3_30b_a3b", 16, flops=flops) for flops in (200.0, 800.0))
    layout = Layout.parse("pp2-ep4").fit(16)
    assert inference_seconds(slow, layout) > 1.5 * inference_seconds(fast, layout)
    engine = EngineLayout()
    wide, narrow = (published("qwen3_30b_a3b", 16, memory_bandwidth=speed) for speed in (4000.0, 1000.0))
    assert rollout_side(narrow, engine).seconds > 2 * rollout_side(wide, engine).seconds


def test_inference_seconds_cp_adds_its_exchange():
    inputs = replace(tiny(MIXTURE, sequence=64), intra_node=1e-3)
    assert inference_seconds(inputs, Layout.parse("cp2").fit(8)) > inference_seconds(inputs, Layout.parse("tp1").fit(8))


def test_pair_of_has_all_parts():
    inputs = tiny(DENSE)
    train = train_side(inputs, Layout.parse("tp2").fit(8))
    pair = pair_of(inputs, train, rollout_side(inputs, EngineLayout(tp=2), train.memory))
    assert pair.parts.inference == train.inference_seconds > 0 and pair.parts.update == train.update_seconds > 0
    assert pair.parts.rollout == pair.rollout.seconds and pair.parts.sync == pair.sync.seconds
    assert pair.seconds == pytest.approx(sum(getattr(pair.parts, name) for name in PARTS))
