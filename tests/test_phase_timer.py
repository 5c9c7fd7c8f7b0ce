"""Seconds and spans of the innermost phases."""

import pytest

from verl_mg import phase_timer as module
from verl_mg.phase_timer import MAX_SPANS, PhaseTimer


@pytest.fixture
def now(monkeypatch):
    time = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: time[0])
    return time


def test_nested_phases_count_each_second_for_the_innermost(now):
    timer = PhaseTimer()
    with timer("other"):
        now[0] += 1
        with timer("row_dispatch"):
            now[0] += 2
            with timer("forward"):
                now[0] += 4
            now[0] += 8
        now[0] += 16
    now[0] += 32  # in no phase
    with timer("row_dispatch"):
        now[0] += 64
    assert timer.take() == {"other": 17, "row_dispatch": 74, "forward": 4}
    assert timer.take() == {}


def test_exception_inside_a_phase_ends_the_phase(now):
    timer = PhaseTimer()
    with pytest.raises(KeyError), timer("row_dispatch"):
        now[0] += 1
        raise KeyError
    now[0] += 1
    assert timer.take() == {"row_dispatch": 1}


def test_spans_of_nested_phases_are_those_of_the_innermost(now):
    timer = PhaseTimer()
    with timer("role_compute"):
        now[0] += 1
    assert timer.take_spans() == []  # recorded from here on
    with timer("other"):
        now[0] += 1
        with timer("row_dispatch"):
            now[0] += 2
        with timer("row_dispatch"):
            now[0] += 4
        now[0] += 8
    now[0] += 16
    with timer("other"):
        now[0] += 32
    assert timer.take_spans() == [
        ("other", 101, 102),
        ("row_dispatch", 102, 108),  # adjacent spans are merged, empty ones dropped
        ("other", 108, 116),
        ("other", 132, 164),
    ]
    assert timer.take_spans() == []


def test_spans_beyond_the_maximum_keep_the_longest_in_order(now):
    timer = PhaseTimer()
    timer.take_spans()
    for i in range(10 * MAX_SPANS):
        with timer("row_dispatch"):
            now[0] += 5.0 if i % 100 == 0 else 0.5
        with timer("role_compute"):
            now[0] += 0.5
    spans = timer.take_spans()
    assert MAX_SPANS // 2 <= len(spans) <= MAX_SPANS
    assert sum(end - begin == 5.0 for _, begin, end in spans) == MAX_SPANS // 10 + 1
    assert spans == sorted(spans, key=lambda span: span[1])


def waiting_seconds(exact: bool) -> dict[str, float]:
    timer = PhaseTimer(exact)
    with timer("other"):
        timer.barrier("generate")
    return timer.take()


def test_barrier_of_an_exact_timer_counts_as_the_wait_for_the_phase(ranks):
    assert all(seconds.keys() == {"other", "wait_generate"} for seconds in ranks.run(2, waiting_seconds, True))
    assert all(seconds.keys() == {"other"} for seconds in ranks.run(2, waiting_seconds, False))
