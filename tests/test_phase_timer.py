"""Each second counts for the innermost phase, and spans say when."""

import pytest

from verl_mg import phase_timer as module
from verl_mg.phase_timer import MAX_SPANS, PhaseTimer


@pytest.fixture
def now(monkeypatch):
    """Time that stands still until told."""
    time = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: time[0])
    return time


def test_an_outer_phase_stands_still_inside_an_inner_one(now):
    timer = PhaseTimer()
    with timer("recipe"):
        now[0] += 1
        with timer("rows"):
            now[0] += 2
            with timer("forward"):
                now[0] += 4
            now[0] += 8
        now[0] += 16
    now[0] += 32  # in no phase
    with timer("rows"):
        now[0] += 64
    assert timer.take() == {"recipe": 17, "rows": 74, "forward": 4}
    assert timer.take() == {}


def test_what_fails_ends_its_phase(now):
    timer = PhaseTimer()
    with pytest.raises(KeyError), timer("rows"):
        now[0] += 1
        raise KeyError
    now[0] += 1
    assert timer.take() == {"rows": 1}


def test_spans_are_those_of_the_innermost_phase(now):
    timer = PhaseTimer()
    with timer("work"):
        now[0] += 1
    assert timer.take_spans() == []  # kept from here on
    with timer("recipe"):
        now[0] += 1
        with timer("rows"):
            now[0] += 2
        with timer("rows"):
            now[0] += 4
        now[0] += 8
    now[0] += 16
    with timer("recipe"):
        now[0] += 32
    assert timer.take_spans() == [
        ("recipe", 101, 102),
        ("rows", 102, 108),  # two that touch are one, and nothing of no length lies between them
        ("recipe", 108, 116),
        ("recipe", 132, 164),
    ]
    assert timer.take_spans() == []


def test_of_very_many_spans_the_longest_stay_in_order(now):
    timer = PhaseTimer()
    timer.take_spans()
    for i in range(10 * MAX_SPANS):
        with timer("rows"):
            now[0] += 5.0 if i % 100 == 0 else 0.5
        with timer("work"):
            now[0] += 0.5
    spans = timer.take_spans()
    assert MAX_SPANS // 2 <= len(spans) <= MAX_SPANS
    assert sum(end - begin == 5.0 for _, begin, end in spans) == MAX_SPANS // 10 + 1
    assert spans == sorted(spans, key=lambda span: span[1])
