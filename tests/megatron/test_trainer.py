"""The learning-rate schedule, step by step, against its formulas."""

import math

import pytest

from verl_mg.config import OptimizerConfig
from verl_mg.errors import UserError
from verl_mg.megatron.trainer import check_schedule, learning_rate_schedule


class Groups:
    """All that a schedule asks of an optimizer."""

    def __init__(self):
        self.param_groups = [{"lr": 0.0, "weight_decay": 0.0, "wd_mult": 1.0}]


def rates(steps, **config):
    optimizer = Groups()
    schedule = learning_rate_schedule(optimizer, OptimizerConfig(lr=1.0, **config))
    seen = []
    for _ in range(steps):
        schedule.step(1)
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


def test_constant_after_warm_up():
    assert rates(6, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert rates(3) == [1, 1, 1]


def test_linear_falls_to_the_floor_and_stays():
    got = rates(7, schedule="linear", decay_steps=5, warmup_steps=1, min_lr=0.2)
    assert got == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine():
    got = rates(5, schedule="cosine", decay_steps=4, min_lr=0.1)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4)]
    assert got == pytest.approx([*expected, 0.1])


def test_a_decay_without_its_length_is_refused():
    with pytest.raises(UserError, match=r"write actor\.optimizer\.decay_steps"):
        check_schedule(OptimizerConfig(schedule="cosine"))
