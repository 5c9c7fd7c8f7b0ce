"""Each second counts for the innermost phase, and spans say when."""

import pytest

from verl_mg import clock as module
from verl_mg.clock import MOST_SPANS, Clock


@pytest.fixture
def now(monkeypatch):
    """Time that stands still until told."""
    time = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: time[0])
    return time


def test_an_outer_phase_stands_still_inside_an_inner_one(now):
    clock = Clock()
    with clock("recipe"):
        now[0] += 1
        with clock("rows"):
            now[0] += 2
            with clock("forward"):
                now[0] += 4
            now[0] += 8
        now[0] += 16
    now[0] += 32  # in no phase
    with clock("rows"):
        now[0] += 64
    assert clock.take() == {"recipe": 17, "rows": 74, "forward": 4}
    assert clock.take() == {}


def test_what_fails_ends_its_phase(now):
    clock = Clock()
    with pytest.raises(KeyError), clock("rows"):
        now[0] += 1
        raise KeyError
    now[0] += 1
    assert clock.take() == {"rows": 1}


def test_spans_are_those_of_the_innermost_phase(now):
    clock = Clock()
    with clock("work"):
        now[0] += 1
    assert clock.take_spans() == []  # kept from here on
    with clock("recipe"):
        now[0] += 1
        with clock("rows"):
            now[0] += 2
        with clock("rows"):
            now[0] += 4
        now[0] += 8
    now[0] += 16
    with clock("recipe"):
        now[0] += 32
    assert clock.take_spans() == [
        ("recipe", 101, 102),
        ("rows", 102, 108),  # two that touch are one, and nothing of no length lies between them
        ("recipe", 108, 116),
        ("recipe", 132, 164),
    ]
    assert clock.take_spans() == []


def test_of_very_many_spans_the_longest_stay_in_order(now):
    clock = Clock()
    clock.take_spans()
    for i in range(10 * MOST_SPANS):
        with clock("rows"):
            now[0] += 5.0 if i % 100 == 0 else 0.5
        with clock("work"):
            now[0] += 0.5
    spans = clock.take_spans()
    assert MOST_SPANS // 2 <= len(spans) <= MOST_SPANS
    assert sum(end - begin == 5.0 for _, begin, end in spans) == MOST_SPANS // 10 + 1
    assert spans == sorted(spans, key=lambda span: span[1])
