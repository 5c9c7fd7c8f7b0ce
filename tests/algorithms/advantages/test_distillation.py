"""Advantages by token: of distillation, and of PRIME's implicit rewards."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mg.algorithms.advantages import distillation_advantages, implicit_rewards, prime_advantages, rloo
from verl_mg.algorithms.losses import gpg_loss
from verl_mg.errors import UserError


def test_the_policy_gradient_descends_the_reverse_kl():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([0.1, 0.4, 1.0, -2.0], dtype=torch.float64), 0)
    student, mask = torch.log_softmax(logits, 0), torch.ones(4, dtype=torch.bool)
    (wanted,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)
    loss, _ = gpg_loss(student, distillation_advantages(student, teacher, mask), mask)
    (found,) = torch.autograd.grad((student.exp().detach() * loss).sum(), logits)
    assert wanted.abs().max() > 0.01
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_silent_outside_the_mask_and_without_gradient():
    student = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    found = distillation_advantages(student, torch.tensor([[-3.0, -1.0]]), torch.tensor([[True, False]]))
    assert found.tolist() == [[-2.0, 0.0]] and not found.requires_grad


def test_distillation_gradient_with_spans_is_that_of_the_reverse_kl_of_texts():
    # The student writes a text in two tokens, the teacher in one: all nine texts, each with its probability.
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_()
    second = torch.randn(3, 3, generator=generator, dtype=torch.float64).requires_grad_()
    texts = torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0)
    one, two = first.log_softmax(0), second.log_softmax(1)
    logprobs = torch.stack([one[:, None].expand(3, 3), two], -1).reshape(18)  # the tokens of one text after another
    teacher = torch.stack([torch.zeros(9), texts], 1).reshape(18)  # at the last token of a span
    spans, mask = torch.arange(9).repeat_interleave(2), torch.ones(18, dtype=torch.bool)
    advantages = distillation_advantages(logprobs.detach(), teacher, mask, spans)
    probability = logprobs.reshape(9, 2).sum(1)
    loss = -(probability.exp().detach() * (advantages * logprobs).reshape(9, 2).sum(1)).sum()
    found = torch.autograd.grad(loss, [first, second], retain_graph=True)
    kl = (probability.exp() * (probability - texts)).sum()
    for gradient, expected in zip(found, torch.autograd.grad(kl, [first, second]), strict=True):
        assert torch.allclose(gradient, expected) and expected.abs().min() > 1e-4


def test_distillation_advantages_of_tokens_without_a_span_are_zero():
    old, teacher = torch.tensor([-1.0, -2.0, -1.0, -0.5]), torch.tensor([0.0, -1.0, -3.0, 0.0])
    mask = torch.tensor([True, True, True, False])
    assert distillation_advantages(old, teacher, mask, torch.tensor([0, 0, -1, 1])).tolist() == [2, 2, 0, 0]
    alone = distillation_advantages(old, teacher, mask, torch.arange(4))
    assert alone.tolist() == distillation_advantages(old, teacher, mask).tolist() == [1, 1, -2, 0]


TOKEN = st.tuples(st.floats(-2, 2), st.booleans())
ROW = st.tuples(st.integers(0, 2), st.floats(-1, 1), st.lists(TOKEN, min_size=4, max_size=4))


def test_implicit_rewards_outside_the_mask_are_zero():
    columns = torch.tensor([[-1.0, -2.0, math.nan]], requires_grad=True), torch.tensor([[-1.5, -1.0, -1.0]])
    found = implicit_rewards(*columns, torch.tensor([[True, True, False]]), 0.05)
    assert found.tolist() == [pytest.approx([0.025, -0.05, 0.0])] and not found.requires_grad
    with pytest.raises(UserError, match="beta is 0"):
        implicit_rewards(*columns, torch.ones(1, 3).bool(), 0)


@settings(max_examples=50)
@given(st.lists(ROW, min_size=1, max_size=6), st.floats(0.5, 1), st.sampled_from([1.0, 5.0]))
def test_prime_advantages_of_random_groups_equal_loops(rows, gamma, weight):
    groups = torch.tensor([row[0] for row in rows])
    scores = torch.tensor([row[1] for row in rows], dtype=torch.float64)
    mask = torch.tensor([[counts for _, counts in row[2]] for row in rows])
    rewards = torch.tensor([[value for value, _ in row[2]] for row in rows], dtype=torch.float64)
    found = prime_advantages(torch.where(mask, rewards, math.nan), scores, mask, groups, gamma, weight)

    kept = [[value for value, counts in row[2] if counts] for row in rows]
    means = [sum(values) / len(values) if values else 0.0 for values in kept]
    for i, (group, score, tokens) in enumerate(rows):
        others = [j for j in range(len(rows)) if j != i and rows[j][0] == group]
        baseline = sum(means[j] for j in others) / len(others) if others else means[i]
        outcome = score - sum(rows[j][1] for j in others) / len(others) if others else 0.0
        expected, ahead = [], 0.0
        for value, counts in reversed(tokens):
            if counts:
                ahead = value - baseline + gamma * ahead
            expected.insert(0, weight * ahead + outcome if counts else 0.0)
        assert found[i].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_without_process_rewards_it_is_rloo():
    scores, groups, mask = torch.tensor([1.0, 0.0, 0.5]), torch.zeros(3).long(), torch.ones(3, 2).bool()
    found = prime_advantages(torch.zeros(3, 2), scores, mask, groups)
    torch.testing.assert_close(found, rloo(scores, groups, torch.arange(3))[:, None].expand(3, 2))
