"""KL estimators: formulas token by token, expectations over a whole distribution, gradients."""

import math

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from verl_mg.algorithms.divergence import Divergence, top_divergence
from verl_mg.algorithms.kl import adapted, in_reward, penalty
from verl_mg.errors import UserError

LOGPROBS = torch.tensor([-1.0, -0.5, -3.0, -2.0, -4.0], dtype=torch.float64)
REFERENCE = torch.tensor([-1.5, -0.25, -3.0, -7.0, -1.0], dtype=torch.float64)

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
def test_value_and_gradient(kind):
    logprobs = LOGPROBS.clone().requires_grad_()
    found = penalty(logprobs, REFERENCE, kind)
    pairs = list(zip(LOGPROBS.tolist(), REFERENCE.tolist(), strict=True))
    expected = [FORMULAS[kind](p, q) for p, q in pairs]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    found.sum().backward()
    slopes = torch.tensor([SLOPES[kind](p - q) for p, q in pairs], dtype=torch.float64)
    assert logprobs.grad.abs().max() > 0
    torch.testing.assert_close(logprobs.grad, slopes, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3", "k1+", "k3+"])
def test_expectation_is_the_kl(kind):
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
def test_kl_penalty_in_expectation_has_the_documented_gradient(kind, of):
    gradients = expected_gradients(kind)
    assert (gradients["forward"] - gradients["reverse"]).abs().max() > 0.01
    torch.testing.assert_close(gradients["found"], gradients[of], rtol=1e-12, atol=1e-12)


def test_k1_as_a_loss_teaches_nothing():
    assert expected_gradients("k1")["found"].abs().max() < 1e-15


def test_k3_keeps_small_differences_in_float32():
    logprobs = torch.tensor([-(2.0**-12)])
    # The second order term alone: d^2 / 2, which exp(-d) - 1 + d would lose to rounding.
    torch.testing.assert_close(penalty(logprobs, torch.zeros(1), "k3"), torch.tensor([2.0**-25]), rtol=1e-2, atol=0)


def test_unknown_kind_lists_the_kinds():
    with pytest.raises(UserError, match="'k4' is unknown. Write one of k1, abs, k2, k3, k1\\+, k3\\+"):
        penalty(LOGPROBS, REFERENCE, "k4")


def test_kl_in_reward_outside_the_mask_is_zero():
    mask = torch.tensor([[True, True, False]])
    logprobs = torch.tensor([[-1.0, -2.0, math.nan]], requires_grad=True)
    columns = torch.tensor([[0.0, 1.0, math.nan]]), logprobs, torch.tensor([[-1.5, -1.0, math.nan]]), mask
    found = in_reward(*columns, 0.1)
    assert found.tolist() == [pytest.approx([-0.05, 1.1, 0.0])] and not found.requires_grad
    assert in_reward(*columns, 0.1, "k2").tolist() == [pytest.approx([-0.0125, 0.95, 0.0])]


def test_adapted_coefficient_of_known_errors_is_clipped():
    for observed, error in ((6.0, 0.0), (6.6, 0.1), (60.0, 0.2), (5.7, -0.05), (0.0, -0.2)):
        assert adapted(0.2, observed, 6.0, 10_000, 256) == pytest.approx(0.2 * (1 + error * 256 / 10_000), rel=1e-12)
    for target, horizon, name in ((0.0, 1.0, "target"), (1.0, -1.0, "horizon")):
        with pytest.raises(UserError, match=f"the {name} of an adaptive KL coefficient"):
            adapted(0.2, 1.0, target, horizon, 1)


VOCAB, TOKENS, K, BETA = 9, 5, 4, 0.3


def distributions():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2)]


def expected(kind, teacher, student):
    """By torch.distributions, from log-probs."""
    p, q = (Categorical(logits=side) for side in (teacher, student))

    def mixed(share):
        return Categorical(probs=share * p.probs + (1 - share) * q.probs)

    return {
        "reverse": lambda: kl_divergence(q, p),
        "forward": lambda: kl_divergence(p, q),
        "js": lambda: BETA * kl_divergence(p, mixed(BETA)) + (1 - BETA) * kl_divergence(q, mixed(BETA)),
        "skew_forward": lambda: kl_divergence(p, mixed(BETA)),
        "skew_reverse": lambda: kl_divergence(q, mixed(1 - BETA)),
    }[kind]()


KINDS = ["reverse", "forward", "js", "skew_forward", "skew_reverse"]


@pytest.mark.parametrize("kind", KINDS)
def test_terms_add_up_to_the_divergence_and_slopes_are_their_derivatives(kind):
    teacher, student = distributions()
    divergence = Divergence(kind=kind, beta=BETA)
    student.requires_grad_()
    terms = divergence.terms(teacher, student)
    assert torch.allclose(terms.sum(-1), expected(kind, teacher, student))
    terms.sum().backward()
    assert torch.allclose(divergence.slopes(teacher, student.detach()), student.grad)
    assert student.grad.abs().min() > 1e-6


def test_js_divergence_nears_the_two_kl_divergences():
    teacher, student = distributions()
    for beta, kind in ((1e-6, "forward"), (1 - 1e-6, "reverse")):
        scale = min(beta, 1 - beta)
        value = Divergence(kind="js", beta=beta).terms(teacher, student).sum(-1) / scale
        assert torch.allclose(value, expected(kind, teacher, student), rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", ["bucket", "renormalized"])
def test_top_divergence_is_that_of_the_coarser_distributions(kind, tail):
    teacher, student = distributions()
    likeliest = teacher.topk(K).indices
    few = [side.gather(1, likeliest).requires_grad_() for side in (teacher, student)]
    value = top_divergence(Divergence(kind=kind, beta=BETA, tail=tail), *few)
    rest = [(1 - side.exp().sum(-1, keepdim=True)).log() for side in few]
    coarse = [torch.cat([side, other], 1) for side, other in zip(few, rest, strict=True)] if tail == "bucket" else few
    wanted = expected(kind, *(side.log_softmax(-1) for side in coarse))
    assert torch.allclose(value, wanted)
    (of_student,) = torch.autograd.grad(value.sum(), few[1])
    (of_oracle,) = torch.autograd.grad(wanted.sum(), few[1])
    assert torch.allclose(of_student, of_oracle) and of_student.abs().max() > 1e-3
    if tail == "bucket":
        assert (value < expected(kind, teacher, student)).all()


def test_top_divergence_of_all_tokens_is_that_of_the_vocabulary():
    teacher, student = (side.float() for side in distributions())
    absent = torch.full((TOKENS, 2), -torch.inf)
    padded = torch.cat([teacher, absent], 1), torch.cat([student, student[:, :2]], 1).requires_grad_()
    for tail in ("bucket", "renormalized"):
        value = top_divergence(Divergence(tail=tail), *padded)
        assert torch.allclose(value, expected("reverse", teacher, student), atol=1e-5)
        (gradient,) = torch.autograd.grad(value.sum(), padded[1])
        assert gradient.isfinite().all() and not gradient[:, VOCAB:].any()
