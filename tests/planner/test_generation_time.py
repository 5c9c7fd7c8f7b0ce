"""Seconds of generation against steps counted one by one, and by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.tiny_inputs import DENSE, IDEAL, MIXTURE, published, tiny
from verl_mg.layout import EngineLayout
from verl_mg.planner.efficiency import FITTED
from verl_mg.planner.iteration_time import decode_seconds, rollout_seconds, samples_at_once
from verl_mg.planner.memory import rollout_memory

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
