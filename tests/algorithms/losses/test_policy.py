"""Per-token losses against a loop over tokens, in value and gradient, and their silence outside the mask."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_mg.algorithms.losses import cispo_loss, clipped_policy_loss, dppo_loss, gpg_loss, sapo_loss
from verl_mg.errors import UserError

LOW, HIGH = 0.2, 0.28
TOKEN = st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-2, 2), st.booleans())


def token_by_hand(new: float, old: float, advantage: float, dual: float | None) -> tuple[float, float, bool, bool]:
    """Loss, its derivative by `new`, and whether the low and the high clip cut that derivative."""
    ratio = math.exp(new - old)
    low, high = advantage < 0 and ratio < 1 - LOW, advantage > 0 and ratio > 1 + HIGH
    if low or high:
        return -advantage * (1 - LOW if low else 1 + HIGH), 0.0, low, high
    if dual is not None and advantage < 0 and ratio > dual:
        return -advantage * dual, 0.0, low, high
    return -advantage * ratio, -advantage * ratio, low, high


def columns(rows: list[tuple[float, float, float, bool]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new, old, advantages, mask = zip(*rows, strict=True)
    numbers = [torch.tensor(column, dtype=torch.float64) for column in (new, old, advantages)]
    return numbers[0].requires_grad_(), numbers[1], numbers[2], torch.tensor(mask)


@settings(max_examples=150)
@given(st.lists(TOKEN, min_size=1, max_size=12), st.sampled_from([None, 1.5, 3.0]))
def test_policy_loss_against_a_loop(rows, dual):
    new, old, advantages, mask = columns(rows)
    loss, metrics = clipped_policy_loss(new, old, advantages, mask, LOW, HIGH, dual)
    loss.sum().backward()
    for i, (p, q, advantage, counts) in enumerate(rows):
        value, slope, low, high = token_by_hand(p, q, advantage, dual) if counts else (0.0, 0.0, False, False)
        ratio = math.exp(p - q) if counts else 0.0
        kl = ratio - 1 - (p - q) if counts else 0.0
        assert loss[i].item() == pytest.approx(value, rel=1e-12, abs=1e-12)
        assert new.grad[i].item() == pytest.approx(slope, rel=1e-12, abs=1e-12)
        assert metrics["ratio"][i].item() == pytest.approx(ratio, rel=1e-12)
        assert metrics["approx_kl"][i].item() == pytest.approx(kl, rel=1e-9, abs=1e-12)
        assert (metrics["clip_fraction_low"][i], metrics["clip_fraction_high"][i]) == (low, high)


def test_gradient_reaches_the_policy_in_training_alone():
    new, old, advantages, mask = columns([(-1.0, -1.1, 0.7, True)])
    old.requires_grad_()
    advantages.requires_grad_()
    loss, metrics = clipped_policy_loss(new, old, advantages, mask, LOW, HIGH)
    loss.sum().backward()
    assert old.grad is None and advantages.grad is None
    assert not any(metric.requires_grad for metric in metrics.values())


@settings(max_examples=100)
@given(st.lists(TOKEN, min_size=1, max_size=8))
def test_cispo_against_a_loop(rows):
    new, old, advantages, mask = columns(rows)
    loss, metrics = cispo_loss(new, old, advantages, mask, LOW, HIGH)
    loss.sum().backward()
    for i, (p, q, advantage, counts) in enumerate(rows):
        ratio = math.exp(p - q)
        weight = min(max(ratio, 1 - LOW), 1 + HIGH) * counts
        assert loss[i].item() == pytest.approx(-weight * advantage * p, rel=1e-12, abs=1e-12)
        assert new.grad[i].item() == pytest.approx(-weight * advantage, rel=1e-12, abs=1e-12)
        clipped = (metrics["clip_fraction_low"][i], metrics["clip_fraction_high"][i])
        assert clipped == (counts and ratio < 1 - LOW, counts and ratio > 1 + HIGH)


@settings(max_examples=100)
@given(st.lists(TOKEN, min_size=1, max_size=8), st.floats(0.5, 3), st.floats(0.5, 3))
def test_sapo_against_a_loop(rows, positive, negative):
    new, old, advantages, mask = columns(rows)
    loss, metrics = sapo_loss(new, old, advantages, mask, positive, negative)
    loss.sum().backward()
    for i, (p, q, advantage, counts) in enumerate(rows):
        tau = positive if advantage > 0 else negative
        ratio = math.exp(p - q)
        opened = 1 / (1 + math.exp(-tau * (ratio - 1)))
        gate = 4 * opened * (1 - opened)
        assert loss[i].item() == pytest.approx(-counts * advantage * opened * 4 / tau, rel=1e-12, abs=1e-12)
        assert new.grad[i].item() == pytest.approx(-counts * advantage * gate * ratio, rel=1e-9, abs=1e-12)
        assert metrics["gate"][i].item() == pytest.approx(counts * gate, rel=1e-9)


def divergence_by_hand(kind: str, new: float, old: float) -> float:
    p, q = math.exp(new), math.exp(old)
    if kind == "tv":
        return abs(p - q)
    others = max(1 - q, 1e-8), max(1 - p, 1e-8)
    return q * math.log(q / p) + others[0] * math.log(others[0] / others[1])


@pytest.mark.parametrize("kind", ["tv", "kl"])
@settings(max_examples=100)
@given(st.lists(TOKEN, min_size=1, max_size=8), st.sampled_from([1.5, 20.0]))
def test_dppo_against_a_loop(kind, rows, largest):
    new, old, advantages, mask = columns(rows)
    loss, metrics = dppo_loss(new, old, advantages, mask, kind, 0.1, 0.15, largest)
    loss.sum().backward()
    for i, (p, q, advantage, counts) in enumerate(rows):
        ratio, divergence = math.exp(p - q), divergence_by_hand(kind, p, q)
        low = counts and advantage < 0 and ratio < 1 and divergence > 0.1
        high = counts and advantage > 0 and ratio > 1 and divergence > 0.15
        weight = 0.0 if low or high or not counts else min(ratio, largest)
        assert loss[i].item() == pytest.approx(-weight * advantage * p, rel=1e-9, abs=1e-12)
        assert new.grad[i].item() == pytest.approx(-weight * advantage, rel=1e-9, abs=1e-12)
        assert (metrics["clip_fraction_low"][i], metrics["clip_fraction_high"][i]) == (low, high)
        assert metrics["divergence"][i].item() == pytest.approx(divergence * counts, rel=1e-7, abs=1e-9)


def test_dppo_holds_frequent_tokens_where_a_clip_holds_rare_ones():
    new, old, advantages, mask = columns(
        [(math.log(0.01), math.log(0.001), 1.0, True), (math.log(0.9), math.log(0.76), 1.0, True)]
    )
    held = {
        "dppo": dppo_loss(new, old, advantages, mask, "tv", 0.1, 0.1)[1]["clip_fraction_high"].tolist(),
        "clip": clipped_policy_loss(new, old, advantages, mask, LOW, HIGH)[1]["clip_fraction_high"].tolist(),
    }
    assert held == {"dppo": [0, 1], "clip": [1, 0]}


@pytest.mark.parametrize(
    ("loss", "numbers", "message"),
    [
        (dppo_loss, ("l2", 0.1, 0.1, 20.0), "divergence 'l2'.*tv, kl"),
        (dppo_loss, ("tv", 0.0, 0.1, 20.0), "limit_low"),
        (dppo_loss, ("tv", 0.1, -1, 20.0), "limit_high"),
        (dppo_loss, ("kl", 0.1, 0.1, 0.0), "ratio_limit"),
        (clipped_policy_loss, (-0.1, 0.2), "clip_low"),
        (clipped_policy_loss, (0.2, math.nan), "clip_high"),
        (clipped_policy_loss, (0.2, 0.2, 1.0), "dual"),
        (cispo_loss, (-0.1, 0.2), "clip_low"),
        (cispo_loss, (0.2, math.nan), "clip_high"),
        (sapo_loss, (0.0, 1.0), "tau_positive"),
        (sapo_loss, (1.0, -1.0), "tau_negative"),
    ],
)
def test_policy_loss_with_numbers_out_of_range_raises(loss, numbers, message):
    column = torch.zeros(1)
    with pytest.raises(UserError, match=message):
        loss(column, column, column, torch.ones(1, dtype=torch.bool), *numbers)


def test_all_agree_where_the_policy_has_not_moved():
    logprobs, advantages = torch.tensor([-1.0, -2.5, -0.1]), torch.tensor([0.7, -0.3, 2.0])
    mask = torch.ones(3, dtype=torch.bool)
    gradients = []
    for loss in (
        lambda new: clipped_policy_loss(new, logprobs, advantages, mask, LOW, HIGH),
        lambda new: cispo_loss(new, logprobs, advantages, mask, LOW, HIGH),
        lambda new: sapo_loss(new, logprobs, advantages, mask),
        lambda new: dppo_loss(new, logprobs, advantages, mask, "tv", 0.1, 0.1),
        lambda new: gpg_loss(new, advantages, mask),
    ):
        leaf = logprobs.clone().requires_grad_()
        loss(leaf)[0].sum().backward()
        gradients.append(leaf.grad)
    for gradient in gradients:
        torch.testing.assert_close(gradient, -advantages)


def test_gpg_loss_and_gradient_equal_the_formula():
    new, _, advantages, mask = columns([(-1.0, 0.0, 0.5, True), (-2.0, 0.0, 3.0, False), (-4.0, 0.0, -2.0, True)])
    loss, metrics = gpg_loss(new, advantages, mask)
    loss.sum().backward()
    assert loss.tolist() == [0.5, 0.0, -8.0] and metrics == {}
    assert new.grad.tolist() == [-0.5, 0.0, 2.0]
