"""Divergences of distributions against torch's own, their slopes against autograd, and those over a few tokens."""

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from verl_mg.algorithms.divergence import Divergence, top_divergence

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
