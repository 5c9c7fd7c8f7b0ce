"""Per-token losses against a loop over tokens, in value and gradient, and their silence outside the mask."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_mg.algorithms.losses import clipped_policy_loss, sft_loss
from verl_mg.errors import UserError

LOW, HIGH = 0.2, 0.28
TOKEN = st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-2, 2), st.booleans())


def token_by_hand(
    new: float, old: float, advantage: float, dual: float | None
) -> tuple[float, float, bool, bool]:
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
def test_policy_loss_against_a_loop(rows: list[tuple[float, float, float, bool]], dual: float | None) -> None:
    new, old, advantages, mask = columns(rows)
    loss, metrics = clipped_policy_loss(new, old, advantages, mask, LOW, HIGH, dual)
    loss.sum().backward()
    assert new.grad is not None
    for i, (p, q, advantage, counts) in enumerate(rows):
        value, slope, low, high = token_by_hand(p, q, advantage, dual) if counts else (0.0, 0.0, False, False)
        ratio = math.exp(p - q) if counts else 0.0
        kl = ratio - 1 - (p - q) if counts else 0.0
        assert loss[i].item() == pytest.approx(value, rel=1e-12, abs=1e-12)
        assert new.grad[i].item() == pytest.approx(slope, rel=1e-12, abs=1e-12)
        assert metrics["ratio"][i].item() == pytest.approx(ratio, rel=1e-12)
        assert metrics["approx_kl"][i].item() == pytest.approx(kl, rel=1e-9, abs=1e-12)
        assert (metrics["clip_fraction_low"][i], metrics["clip_fraction_high"][i]) == (low, high)


def test_every_branch_by_hand() -> None:
    logs = [math.log(ratio) for ratio in (1.0, 2.0, 2.0, 0.5, 0.5, 4.0)]
    advantages = [1.0, 1.0, -1.0, 1.0, -1.0, -1.0]
    rows = [(log - 5.0, -5.0, advantage, True) for log, advantage in zip(logs, advantages, strict=True)]
    new, old, advantage, mask = columns(rows)
    loss, metrics = clipped_policy_loss(new, old, advantage, mask, LOW, HIGH, dual_clip=3.0)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-1.0, -1.28, 2.0, -0.5, 0.8, 3.0])
    assert new.grad is not None and new.grad.tolist() == pytest.approx([-1.0, 0.0, 2.0, -0.5, 0.0, 0.0])
    assert metrics["clip_fraction_high"].tolist() == [0, 1, 0, 0, 0, 0]
    assert metrics["clip_fraction_low"].tolist() == [0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_garbage_outside_the_mask_reaches_nothing(garbage: float) -> None:
    mask = torch.tensor([True, False, True, False])
    clean = [torch.tensor(c) for c in ([-1.0, -1, -2, -1], [-1.1, -1, -1.9, -1], [0.5, 1, -1, 1])]
    dirty = [torch.where(mask, column, garbage) for column in clean]
    losses, grads = [], []
    for new, old, advantages in (clean, dirty):
        for loss_function in (
            lambda n, o=old, a=advantages: clipped_policy_loss(n, o, a, mask, LOW, HIGH, 3.0),
            lambda n: sft_loss(n, mask),
        ):
            leaf = new.clone().requires_grad_()
            loss, metrics = loss_function(leaf)
            loss.sum().backward()
            assert leaf.grad is not None and leaf.grad[mask].abs().min() > 0
            for column in (loss, leaf.grad, *metrics.values()):
                assert column[~mask].tolist() == [0.0, 0.0]
                assert column.isfinite().all()
            losses.append(loss.detach())
            grads.append(leaf.grad)
    assert torch.equal(torch.stack(losses[:2]), torch.stack(losses[2:]))
    assert torch.equal(torch.stack(grads[:2]), torch.stack(grads[2:]))


def test_gradient_reaches_the_policy_in_training_alone() -> None:
    new, old, advantages, mask = columns([(-1.0, -1.1, 0.7, True)])
    old.requires_grad_()
    advantages.requires_grad_()
    loss, metrics = clipped_policy_loss(new, old, advantages, mask, LOW, HIGH)
    loss.sum().backward()
    assert old.grad is None and advantages.grad is None
    assert not any(metric.requires_grad for metric in metrics.values())


def test_on_policy_gradient_is_minus_the_advantage() -> None:
    new, old, advantages, mask = columns([(-1.0, -1.0, 0.7, True), (-2.0, -2.0, -0.3, True)])
    loss, _ = clipped_policy_loss(new, old, advantages, mask, 0.2, 0.2)
    loss.sum().backward()
    assert new.grad is not None and new.grad.tolist() == [-0.7, 0.3]


def test_sft_loss() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    loss, metrics = sft_loss(logprobs, torch.tensor([True, False, True]))
    loss.sum().backward()
    assert loss.tolist() == [1.0, 0.0, 3.0]
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1.0, 0.0, -1.0]
    assert metrics == {}


@pytest.mark.parametrize(
    ("clips", "name"),
    [((-0.1, 0.2, None), "clip_low"), ((0.2, math.nan, None), "clip_high"), ((0.2, 0.2, 1.0), "dual")],
)
def test_clips_that_make_no_sense(clips: tuple[float, float, float | None], name: str) -> None:
    column = torch.zeros(1)
    with pytest.raises(UserError, match=name):
        clipped_policy_loss(column, column, column, torch.ones(1, dtype=torch.bool), *clips)
