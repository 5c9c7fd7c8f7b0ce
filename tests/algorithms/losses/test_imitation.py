"""Likelihood losses by hand."""

import math

import torch

from verl_mg.algorithms.losses import imitation_loss, sft_loss


def test_sft_loss_outside_the_mask_is_zero() -> None:
    logprobs = torch.tensor([-1.0, math.nan, -3.0], requires_grad=True)
    loss, metrics = sft_loss(logprobs, torch.tensor([True, False, True]))
    loss.sum().backward()
    assert loss.tolist() == [1.0, 0.0, 3.0]
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1.0, 0.0, -1.0]
    assert metrics == {}


def test_imitation_loss_with_weights_equals_the_formula() -> None:
    logprobs = torch.tensor([-1.0, math.nan, -3.0, -2.0], requires_grad=True)
    weights = torch.tensor([2.0, math.inf, 0.0, 0.5], requires_grad=True)
    loss, metrics = imitation_loss(logprobs, weights, torch.tensor([True, False, True, True]))
    loss.sum().backward()
    assert loss.tolist() == [2.0, 0.0, 0.0, 1.0]
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-2.0, 0.0, 0.0, -0.5]
    assert weights.grad is None
    assert metrics["imitated"].tolist() == [1.0, 0.0, 0.0, 1.0]
