"""Losses of the value head and of imitation."""

import math
import statistics

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from verl_mg.algorithms.losses import explained_variance, imitation_loss, sft_loss, value_loss
from verl_mg.errors import UserError

TOKEN = st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3), st.booleans())


@settings(max_examples=150)
@given(st.lists(TOKEN, min_size=1, max_size=10), st.sampled_from([None, 0.2, 1.5]))
def test_against_a_loop(rows, clip):
    new, old, wanted, mask = zip(*rows, strict=True)
    assume(clip is None or all(abs(value - before) != clip for value, before in zip(new, old, strict=True)))  # a kink
    values = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    others = [torch.tensor(column, dtype=torch.float64) for column in (old, wanted)]
    loss, metrics = value_loss(values, *others, torch.tensor(mask), clip)
    loss.sum().backward()
    for i, (value, before, target, counts) in enumerate(rows):
        expected, slope, cut = (value - target) ** 2 / 2, value - target, False
        if clip is not None and abs(value - before) > clip:
            bounded = before + math.copysign(clip, value - before)
            if (bounded - target) ** 2 > (value - target) ** 2:
                expected, slope, cut = (bounded - target) ** 2 / 2, 0.0, True
        assert loss[i].item() == pytest.approx(expected * counts, rel=1e-12, abs=1e-12)
        assert values.grad[i].item() == pytest.approx(slope * counts, rel=1e-12, abs=1e-12)
        assert metrics["value_clip_fraction"][i] == (cut and counts)


def test_garbage_and_constants():
    mask = torch.tensor([True, False])
    columns = [torch.tensor([number, math.nan], requires_grad=True) for number in (1.0, 0.9, 3.0)]
    loss, metrics = value_loss(*columns, mask, 0.5)
    loss.sum().backward()
    assert loss.tolist() == [2.0, 0.0]
    assert columns[0].grad.tolist() == [-2.0, 0.0]
    assert columns[1].grad is None and columns[2].grad is None
    assert all(column.isfinite().all() and not column.requires_grad for column in metrics.values())


def test_explained_variance_of_known_means_equals_the_formula():
    returns, values = [0.5, -1.0, 2.0, 1.0, 0.0], [0.4, -0.5, 1.0, 1.5, 0.1]
    mask = torch.ones(5, dtype=torch.bool)
    columns = [torch.tensor(column, dtype=torch.float64) for column in (values, values, returns)]
    means = {name: float(column.mean()) for name, column in value_loss(*columns, mask, None)[1].items()}
    left = [r - v for r, v in zip(returns, values, strict=True)]
    expected = 1 - statistics.pvariance(left) / statistics.pvariance(returns)
    assert 0.5 < expected < 1 and explained_variance(means) == pytest.approx(expected, rel=1e-12)


def test_returns_that_do_not_vary_are_not_explained():
    columns = torch.randn(5), torch.zeros(5), torch.full((5,), 0.3)
    metrics = value_loss(*columns, torch.ones(5, dtype=torch.bool), None)[1]
    assert math.isnan(explained_variance({name: float(column.mean()) for name, column in metrics.items()}))


def test_a_clip_that_makes_no_sense():
    with pytest.raises(UserError, match="clip is 0"):
        value_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), 0)


def test_sft_loss_outside_the_mask_is_zero():
    logprobs = torch.tensor([-1.0, math.nan, -3.0], requires_grad=True)
    loss, metrics = sft_loss(logprobs, torch.tensor([True, False, True]))
    loss.sum().backward()
    assert loss.tolist() == [1.0, 0.0, 3.0]
    assert logprobs.grad.tolist() == [-1.0, 0.0, -1.0]
    assert metrics == {}


def test_imitation_loss_with_weights_equals_the_formula():
    logprobs = torch.tensor([-1.0, math.nan, -3.0, -2.0], requires_grad=True)
    weights = torch.tensor([2.0, math.inf, 0.0, 0.5], requires_grad=True)
    loss, metrics = imitation_loss(logprobs, weights, torch.tensor([True, False, True, True]))
    loss.sum().backward()
    assert loss.tolist() == [2.0, 0.0, 0.0, 1.0]
    assert logprobs.grad.tolist() == [-2.0, 0.0, 0.0, -0.5]
    assert weights.grad is None
    assert metrics["imitated"].tolist() == [1.0, 0.0, 0.0, 1.0]
