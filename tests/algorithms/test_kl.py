"""KL estimators: formulas token by token, expectations over a whole distribution, gradients."""

import math

import pytest
import torch

from verl_mg.algorithms.kl import adapted, in_reward, penalty
from verl_mg.errors import UserError

LOGPROBS = torch.tensor([-1.0, -0.5, -3.0, -2.0], dtype=torch.float64)
REFERENCE = torch.tensor([-1.5, -0.25, -3.0, -7.0], dtype=torch.float64)

FORMULAS = {
    "k1": lambda p, q: p - q,
    "abs": lambda p, q: abs(p - q),
    "k2": lambda p, q: (p - q) ** 2 / 2,
    "k3": lambda p, q: math.exp(q) / math.exp(p) - 1 - (q - p),
    "k1+": lambda p, q: p - q,
    "k3+": lambda p, q: math.exp(q) / math.exp(p) - 1 - (q - p),
}
SLOPES = {
    "k1": lambda d: 1.0,
    "abs": lambda d: math.copysign(1.0, d) if d else 0.0,
    "k2": lambda d: d,
    "k3": lambda d: 1 - math.exp(-d),
    "k1+": lambda d: d,
    "k3+": lambda d: d,
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


@pytest.mark.parametrize("kind", ["k1", "k3", "k1+", "k3+"])
def test_expectation_is_the_kl(kind: str) -> None:
    policy = torch.log_softmax(torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64), 0)
    reference = torch.log_softmax(torch.tensor([0.1, 0.4, 1.0, -2.0], dtype=torch.float64), 0)
    kl = sum(math.exp(p) * (p - q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
    assert kl > 0.1
    assert (policy.exp() * penalty(policy, reference, kind)).sum().item() == pytest.approx(kl, rel=1e-12)


def expected_gradients(kind: str) -> dict[str, torch.Tensor]:
    """By the logits: that of the penalty in expectation, and those of KL(policy || reference) and of its reverse."""
    logits = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.1, 0.4, 1.0], dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    values = {
        "found": policy.exp().detach() * penalty(policy, reference, kind),
        "forward": policy.exp() * (policy - reference),
        "reverse": reference.exp() * (reference - policy),
    }
    return {name: torch.autograd.grad(value.sum(), logits, retain_graph=True)[0] for name, value in values.items()}


@pytest.mark.parametrize(("kind", "of"), [("k2", "forward"), ("k1+", "forward"), ("k3+", "forward"), ("k3", "reverse")])
def test_kl_penalty_in_expectation_has_the_documented_gradient(kind: str, of: str) -> None:
    gradients = expected_gradients(kind)
    assert (gradients["forward"] - gradients["reverse"]).abs().max() > 0.01
    torch.testing.assert_close(gradients["found"], gradients[of], rtol=1e-12, atol=1e-12)


def test_k1_as_a_loss_teaches_nothing() -> None:
    assert expected_gradients("k1")["found"].abs().max() < 1e-15


def test_k3_keeps_small_differences_in_float32() -> None:
    logprobs = torch.tensor([-(2.0**-12)])
    # The second order term alone: d^2 / 2, which exp(-d) - 1 + d would lose to rounding.
    torch.testing.assert_close(penalty(logprobs, torch.zeros(1), "k3"), torch.tensor([2.0**-25]), rtol=1e-2, atol=0)


def test_unknown_kind_lists_the_kinds() -> None:
    with pytest.raises(UserError, match="'k4' is unknown. Write one of k1, abs, k2, k3, k1\\+, k3\\+"):
        penalty(LOGPROBS, REFERENCE, "k4")


def test_kl_in_reward_outside_the_mask_is_zero() -> None:
    mask = torch.tensor([[True, True, False]])
    logprobs = torch.tensor([[-1.0, -2.0, math.nan]], requires_grad=True)
    columns = torch.tensor([[0.0, 1.0, math.nan]]), logprobs, torch.tensor([[-1.5, -1.0, math.nan]]), mask
    found = in_reward(*columns, 0.1)
    assert found.tolist() == [pytest.approx([-0.05, 1.1, 0.0])] and not found.requires_grad
    assert in_reward(*columns, 0.1, "k2").tolist() == [pytest.approx([-0.0125, 0.95, 0.0])]


def test_adapted_coefficient_of_known_errors_is_clipped() -> None:
    for observed, error in ((6.0, 0.0), (6.6, 0.1), (60.0, 0.2), (5.7, -0.05), (0.0, -0.2)):
        assert adapted(0.2, observed, 6.0, 10_000, 256) == pytest.approx(0.2 * (1 + error * 256 / 10_000), rel=1e-12)
    for target, horizon, name in ((0.0, 1.0, "target"), (1.0, -1.0, "horizon")):
        with pytest.raises(UserError, match=f"the {name} of an adaptive KL coefficient"):
            adapted(0.2, 1.0, target, horizon, 1)
