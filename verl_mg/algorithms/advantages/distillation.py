"""On-policy distillation: the teacher judges the tokens that the student wrote."""

import torch
from torch import Tensor


def distillation_advantages(old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """How much likelier the teacher finds each token than the student that wrote it.

    Minus the one-sample estimate "k1" of KL(student || teacher) at that token: a policy gradient with it descends the
    per-token reverse KL (on-policy distillation, arXiv:2306.13649). No reward comes in and
    no token looks beyond itself; add it to other advantages to have both.

    Args:
        old_logprobs: (...) nats, of the student at the start of the iteration.
        teacher_logprobs: (...) nats, the same shape.
        mask: (...) bool.

    Returns:
        (...) nats, 0 outside the mask.
    """
    return torch.where(mask, teacher_logprobs - old_logprobs, 0.0).detach()
