"""A simulated iteration: nothing lost, hand-made cases to the digit, and the closed form where lengths are equal."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.tiny_inputs import DENSE, MIXTURE, tiny
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, Layout
from verl_mg.planner.cost import Work, inference_seconds
from verl_mg.planner.generation_time import decode_seconds
from verl_mg.planner.lengths import Length
from verl_mg.planner.search import rollout_side
from verl_mg.planner.simulate import (
    Engine,
    continuous_batching,
    generate,
    repeated,
    simulate,
    slowest,
    training_seconds,
)

LENGTHS = st.lists(st.builds(Length, st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=30)


def step(running: float, cached: float) -> float:
    return 1 + 0.1 * running + 0.01 * cached


def at_most(count: int):
    return lambda engine, length: len(engine.running) < count


def engines_after(lengths, engines=1, capacity=4, prefill=lambda length: 0.0, step=step):
    return continuous_batching(lengths, engines, at_most(capacity), prefill, step)


def test_continuous_batching_one_engine_equals_hand_count():
    """Two run, the shorter one ends after 2 steps and the third takes its place; prompts of 3 take half a second."""
    lengths = [Length(3, 2), Length(3, 3), Length(3, 1)]
    (engine,) = engines_after(lengths, capacity=2, prefill=lambda length: 0.5)
    first = [step(2, 6), step(2, 8)]
    second = [step(2, 5 + 3)]  # both of the others end with it
    assert engine.clock == pytest.approx(2 * 0.5 + sum(first) + 0.5 + sum(second))
    assert (engine.num_generated, engine.steps, engine.cached, engine.reserved, engine.running) == (6, 3, 0, 0, [])


def token_by_token(lengths: list[Length], capacity: int) -> float:
    """The same of one engine, a step at a time."""
    waiting, running, clock = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < capacity:
            length = waiting.pop(0)
            running.append([length.prompt, length.response])
        clock += step(len(running), sum(cached for cached, _ in running))
        running = [[cached + 1, left - 1] for cached, left in running if left > 1]
    return clock


@given(LENGTHS, st.integers(1, 6))
def test_advance_equals_single_steps(lengths, capacity):
    (engine,) = engines_after(lengths, capacity=capacity)
    assert engine.clock == pytest.approx(token_by_token(lengths, capacity))


@given(LENGTHS, st.integers(1, 5), st.integers(1, 6))
def test_continuous_batching_writes_every_token_once(lengths, engines, capacity):
    done = engines_after(lengths, engines, capacity)
    assert sum(engine.num_generated for engine in done) == sum(length.response for length in lengths)
    assert all(engine.cached == engine.reserved == 0 and not engine.running for engine in done)


@given(LENGTHS, st.integers(1, 5))
def test_continuous_batching_more_work_takes_longer(lengths, capacity):
    def seconds(lengths, step=step):
        return engines_after(lengths, 1, capacity, step=step)[0].clock

    usual = seconds(lengths)
    assert seconds([*lengths, Length(1, 1)]) > usual - 1e-9
    assert seconds(lengths, lambda *at: 2 * step(*at)) == pytest.approx(2 * usual)
    longest = max(length.response for length in lengths)
    assert usual >= sum(step(1, 0) for _ in range(longest)) - 1e-9


@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 8))
def test_continuous_batching_equal_samples_take_whole_rounds(response, capacity, rounds):
    """The closed form: rounds * response steps at a full engine, with half of the responses cached on average."""
    (engine,) = engines_after([Length(5, response)] * (capacity * rounds), capacity=capacity)
    cached = capacity * (5 + (response - 1) / 2)
    assert engine.clock == pytest.approx(rounds * response * step(capacity, cached))


def test_generate_full_cache_makes_samples_wait():
    inputs = tiny(DENSE, sequence=32)
    memory = rollout_side(inputs, EngineLayout()).memory
    tight = replace(memory, limit=max(memory.weights) + 64 * max(memory.per_token))
    assert tight.tokens_per_engine == 64
    lengths = [Length(8, 24)] * 6
    (engine,) = generate(inputs, lengths, 1, tight)
    (large,) = generate(inputs, lengths, 1, memory)
    (few,) = generate(replace(inputs, max_running_requests=2), lengths, 1, memory)
    assert (engine.steps, large.steps, few.steps) == (3 * 24, 24, 3 * 24)
    assert engine.clock == few.clock > large.clock


def test_generate_one_long_sample_bounds_seconds_of_any_number_of_engines():
    lengths = [Length(4, 2)] * 60 + [Length(4, 200)]
    seconds = [max(engine.clock for engine in engines_after(lengths, engines)) for engines in (1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] > 0.8 * seconds[0]


@pytest.mark.parametrize("text", ["tp1", "tp2", "pp2", "tp2-pp2-vpp2", "cp2-pp2", "ep2-pp2"])
def test_training_seconds_equal_rows_is_closed_form(text):
    """64 rows of 32 tokens, two of them a micro-batch."""
    inputs = tiny(MIXTURE, sequence=32, micro_batch=64, tokens_per_iteration=64 * 32)
    layout = Layout.parse(text).fit(8)
    seconds = training_seconds(inputs, [Length(8, 24)] * 64, layout, Work.INFERENCE)
    assert seconds == pytest.approx(inference_seconds(inputs, layout))


def test_slowest_lockstep_waits_in_every_micro_batch():
    seconds = [[3.0, 1.0], [1.0, 3.0]]
    assert slowest(seconds, Layout(), lockstep=False) == 4
    assert slowest(seconds, Layout(), lockstep=True) == 6
    assert slowest(seconds, Layout(pp=3), lockstep=False) == 4 + 2 * 3
    assert slowest(seconds, Layout(pp=3, vpp=2), lockstep=True) == 6 + 3


@settings(max_examples=10)
@given(LENGTHS)
def test_simulate_iteration_has_all_parts(lengths):
    inputs, train, rollout = tiny(DENSE, micro_batch=64), Layout.parse("tp2-pp2"), EngineLayout(tp=2)
    done = simulate(inputs, lengths, train, rollout)
    parts = done.parts
    assert done.tokens == sum(length.total for length in lengths)
    assert min(parts.rollout, parts.inference, parts.update, parts.sync) > 0
    assert done.rate == pytest.approx(done.tokens / parts.all)
    slower = simulate(replace(inputs, flops=1.0), lengths, train, rollout)
    assert slower.parts.update > parts.update and slower.parts.sync == parts.sync


def test_simulate_layout_too_large_raises():
    with pytest.raises(UserError, match="training: it needs"):
        simulate(tiny(DENSE, memory=1e-4, reserve=0.0), [Length(8, 8)], Layout(), EngineLayout())


def test_repeated_is_even():
    lengths = [Length(1, response) for response in range(1, 101)]
    many = [length.response for length in repeated(lengths, 250)]
    assert len(many) == 250 and {many.count(response) for response in range(1, 101)} == {2, 3}
    assert many[:100] != many[100:200] and repeated(lengths, 250) == repeated(lengths, 250)
    assert len(set(repeated(lengths, 40))) == 40


def test_continuous_batching_idle_engine_stays_at_zero():
    assert engines_after([Length(1, 1)], engines=3)[1:] == [Engine(), Engine()]


def test_decode_seconds_is_linear_in_cached_tokens():
    """What lets an engine jump to the next end, where reading and not computing takes longest."""
    inputs = tiny(DENSE)
    memory = rollout_side(inputs, EngineLayout()).memory
    low, middle, high = (decode_seconds(inputs, EngineLayout(), memory, 4, cached) for cached in (100, 200, 300))
    assert middle == pytest.approx((low + high) / 2)
