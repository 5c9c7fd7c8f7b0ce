"""Score centering against sums over a whole small vocabulary, by autograd in float64."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from verl_mg.algorithms.centering import expected_weight, sampler_probabilities
from verl_mg.algorithms.correction import RATIOS, with_other_token

VOCAB, PREFIXES, HIGH = 7, 5, 1.3


def distributions(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs (prefixes, vocabulary) of sampler, policy before the update and policy in training."""
    logits = torch.randn(3, PREFIXES, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q, o, p = logits.log_softmax(-1)
    return q, o, (o + 0.1 * p).log_softmax(-1)


def truncated(log_ratios: Tensor) -> Tensor:
    return log_ratios.exp().clamp(max=HIGH)


def found(q: Tensor, o: Tensor, p: Tensor, k: int, weighs: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """E[w r] as the code computes it from the k likeliest tokens."""
    top = q.topk(k)
    of_top = (column.gather(1, top.indices) for column in (o, p))
    old, new = of_top
    sampled, ratios = sampler_probabilities(top.values, old)
    coefficients = sampled * truncated(ratios) if weighs else sampled
    return expected_weight(new, old, top.values, coefficients)


@pytest.mark.parametrize(("k", "weighs"), product((1, 3, VOCAB), (False, True)))
def test_expected_weight_equals_the_sum_over_the_vocabulary_in_value_and_gradient(k, weighs):
    q, o, p = distributions()
    logits = p.clone().requires_grad_()
    expected, metrics = found(q, o, logits.log_softmax(-1), k, weighs)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    # The sampler as it is known: its k likeliest tokens, and the policy's own tail times one factor.
    whole = logits.log_softmax(-1)
    is_head = torch.zeros_like(q, dtype=torch.bool).scatter(1, q.topk(k).indices, True)
    sampler, old = q.exp(), o.exp()
    rest = [torch.where(is_head, 0.0, part).sum(1, keepdim=True) for part in (sampler, old)]
    known = torch.where(is_head, sampler, old * (rest[0] / rest[1]).nan_to_num())
    assert torch.allclose(known.sum(1), torch.ones(PREFIXES).double())
    weights = truncated(o - known.log()) if weighs else torch.ones_like(known)
    oracle = (known * weights * (whole - o).exp()).sum(1)
    (of_oracle,) = torch.autograd.grad(oracle.sum(), logits)
    tolerance = {"rtol": 1e-4, "atol": 1e-5}  # tails count as at least 1e-6
    torch.testing.assert_close(expected, oracle, **tolerance)
    torch.testing.assert_close(gradient, of_oracle, **tolerance)
    assert of_oracle.abs().max() > 0.02
    torch.testing.assert_close(metrics["centering_mass"], torch.where(is_head, sampler, 0.0).sum(1))
    before = o.clone().requires_grad_()
    (of_drift,) = torch.autograd.grad((known * weights * before.log_softmax(1)).sum(), before)
    torch.testing.assert_close(metrics["centering_drift"], of_drift.abs().sum(1), **tolerance)
    assert weighs or torch.allclose(of_drift, known - old)


def test_centred_surrogates_have_the_mean_gradient_zero_at_a_constant_advantage():
    # Each token of the vocabulary is drawn as often as the sampler draws it.
    q, o, p = distributions(1)
    for weighs in (False, True):
        logits = p.clone().requires_grad_()
        logprobs = logits.log_softmax(-1)
        weights = truncated(o - q) if weighs else torch.ones_like(q)
        surrogates = q.exp() * weights * (logprobs - o).exp()
        expected, _ = found(q, o, logprobs, VOCAB, weighs)
        plain, centred = (
            torch.autograd.grad(total, logits, retain_graph=True)[0]
            for total in (surrogates.sum(), (surrogates.sum(1) - q.exp().sum(1) * expected).sum())
        )
        assert plain.abs().max() > 0.02 and centred.abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 3, VOCAB])
def test_expected_weight_of_the_policy_itself_has_exactly_no_gradient(k, dtype):
    _, o, _ = distributions(2)
    o = o.to(dtype)
    top = o.topk(k).values
    logprobs = top.clone().requires_grad_()
    sampled, ratios = sampler_probabilities(top, top)
    assert not ratios.any() and torch.equal(sampled[:, 0], torch.ones(PREFIXES, dtype=dtype))
    expected, metrics = expected_weight(logprobs, top, top, sampled)
    (gradient,) = torch.autograd.grad(expected.sum(), logprobs)
    assert not gradient.any() and not metrics["centering_drift"].any()
    assert torch.allclose(expected, torch.ones(PREFIXES, dtype=dtype))


def test_missing_entries_of_the_likeliest_tokens_count_as_if_they_were_not_there():
    q, o, p = distributions(3)
    top = q.topk(3)
    old, new = (column.gather(1, top.indices) for column in (o, p))
    sampled, _ = sampler_probabilities(top.values[:, :2], old[:, :2])
    expected, of_few = expected_weight(new[:, :2], old[:, :2], top.values[:, :2], sampled)
    holes = torch.cat([top.values[:, :2], torch.full((PREFIXES, 1), -math.inf)], 1)
    # Whatever the policy finds there: the id of an entry that is missing is 0.
    old[:, 2], new[:, 2] = math.nan, math.inf
    new.requires_grad_()
    sampled, ratios = sampler_probabilities(holes, old)
    value, metrics = expected_weight(new, old, holes, sampled)
    (gradient,) = torch.autograd.grad(value.sum(), new)
    assert torch.equal(value, expected) and not ratios[:, 3].any() and not gradient[:, 2].any()
    assert all(torch.equal(metrics[name], of_few[name]) for name in of_few)
    assert gradient[:, :2].all() and gradient.isfinite().all()


def test_a_token_that_the_policy_hardly_knows_keeps_values_and_gradients_finite():
    sampler, old = torch.tensor([[-0.1, -3.0]]), torch.tensor([[-200.0, -1.0]])
    sampled, _ = sampler_probabilities(sampler, old)
    new = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    value, _ = expected_weight(new, old, sampler, sampled)
    value.sum().backward()
    assert value.isfinite().all() and new.grad.isfinite().all()


@pytest.mark.parametrize("ratio", RATIOS)
def test_log_ratio_with_another_token_is_the_statistic_of_the_changed_sequence(ratio):
    differences, scored, ids = [0.2, -0.4, 0.3, 0.7, -0.1], [True, True, False, True, True], [0, 0, 0, 0, 1]
    others = torch.tensor([[0.5, -1.0], [0.0, 0.3], [9.0, 9.0], [-0.2, 0.1], [0.4, 0.6]])
    masked = torch.tensor([d if counts else 0.0 for d, counts in zip(differences, scored, strict=True)])
    result = with_other_token(ratio, masked, others, torch.tensor(scored), torch.tensor(ids))
    for place, column in product((0, 1, 3, 4), (0, 1)):
        changed = list(differences)
        changed[place] = float(others[place, column])
        peers = [d for d, counts, i in zip(changed, scored, ids, strict=True) if counts and i == ids[place]]
        expected = {"token": changed[place], "sequence": sum(peers), "geometric": sum(peers) / len(peers)}[ratio]
        assert float(result[place, column]) == pytest.approx(expected, abs=1e-6)
