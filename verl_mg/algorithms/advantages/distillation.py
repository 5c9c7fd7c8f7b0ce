"""On-policy distillation: advantages from the log-probs of the teacher."""

import torch
from torch import Tensor


def distillation_advantages(old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Returns the log-ratio of teacher and student for each token that the student wrote.

    Minus the one-sample estimate "k1" of KL(student || teacher) at that token: a policy gradient with it descends the
    per-token reverse KL (on-policy distillation, arXiv:2306.13649). No reward is used, and
    a token does not depend on later ones; add other advantages to combine them.

    Args:
        old_logprobs: (...) nats, of the student at the start of the iteration.
        teacher_logprobs: (...) nats, the same shape.
        mask: (...) bool.

    Returns:
        (...) nats, 0 outside the mask.
    """
    return torch.where(mask, teacher_logprobs - old_logprobs, 0.0).detach()
