"""Each second counts for the innermost phase."""

import pytest

from verl_mg import clock as module
from verl_mg.clock import Clock


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
