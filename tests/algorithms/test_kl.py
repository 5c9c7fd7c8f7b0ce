"""KL estimators: formulas token by token, expectations over a whole distribution, gradients."""

import math

import pytest
import torch

from verl_mg.algorithms.kl import penalty
from verl_mg.errors import UserError

LOGPROBS = torch.tensor([-1.0, -0.5, -3.0, -2.0], dtype=torch.float64)
REFERENCE = torch.tensor([-1.5, -0.25, -3.0, -7.0], dtype=torch.float64)

FORMULAS = {
    "k1": lambda p, q: p - q,
    "abs": lambda p, q: abs(p - q),
    "k2": lambda p, q: (p - q) ** 2 / 2,
    "k3": lambda p, q: math.exp(q) / math.exp(p) - 1 - (q - p),
}
SLOPES = {
    "k1": lambda d: 1.0,
    "abs": lambda d: math.copysign(1.0, d) if d else 0.0,
    "k2": lambda d: d,
    "k3": lambda d: 1 - math.exp(-d),
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_value_and_gradient(kind: str) -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    found = penalty(logprobs, REFERENCE, kind)
    pairs = list(zip(LOGPROBS.tolist(), REFERENCE.tolist(), strict=True))
    expected = [FORMULAS[kind](p, q) for p, q in pairs]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    found.sum().backward()
    slopes = torch.tensor([SLOPES[kind](p - q) for p, q in pairs], dtype=torch.float64)
    assert logprobs.grad is not None and logprobs.grad.abs().max() > 0
    torch.testing.assert_close(logprobs.grad, slopes, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_expectation_is_the_kl(kind: str) -> None:
    policy = torch.log_softmax(torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64), 0)
    reference = torch.log_softmax(torch.tensor([0.1, 0.4, 1.0, -2.0], dtype=torch.float64), 0)
    kl = sum(math.exp(p) * (p - q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
    assert kl > 0.1
    assert (policy.exp() * penalty(policy, reference, kind)).sum().item() == pytest.approx(kl, rel=1e-12)


def test_expected_gradient_of_k2_is_that_of_the_kl() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.1, 0.4, 1.0], dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    (wanted,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad((policy.exp().detach() * penalty(policy, reference, "k2")).sum(), logits)
    assert wanted.abs().max() > 0.01
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_k3_keeps_small_differences_in_float32() -> None:
    logprobs = torch.tensor([-(2.0**-12)])
    # The second order term alone: d^2 / 2, which exp(-d) - 1 + d would lose to rounding.
    torch.testing.assert_close(
        penalty(logprobs, torch.zeros(1), "k3"), torch.tensor([2.0**-25]), rtol=1e-2, atol=0
    )


def test_unknown_kind_lists_the_kinds() -> None:
    with pytest.raises(UserError, match="'k4' is unknown; write one of k1, abs, k2, k3"):
        penalty(LOGPROBS, REFERENCE, "k4")
