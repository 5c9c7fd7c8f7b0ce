"""The gradient of distillation in expectation, over a whole distribution."""

import math

import torch

from verl_mg.algorithms.advantages import distillation_advantages
from verl_mg.algorithms.losses import gpg_loss


def test_the_policy_gradient_descends_the_reverse_kl() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([0.1, 0.4, 1.0, -2.0], dtype=torch.float64), 0)
    student, mask = torch.log_softmax(logits, 0), torch.ones(4, dtype=torch.bool)
    (wanted,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)
    loss, _ = gpg_loss(student, distillation_advantages(student, teacher, mask), mask)
    (found,) = torch.autograd.grad((student.exp().detach() * loss).sum(), logits)
    assert wanted.abs().max() > 0.01
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_silent_outside_the_mask_and_without_gradient() -> None:
    student = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    found = distillation_advantages(student, torch.tensor([[-3.0, -1.0]]), torch.tensor([[True, False]]))
    assert found.tolist() == [[-2.0, 0.0]] and not found.requires_grad
