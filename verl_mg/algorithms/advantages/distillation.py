"""On-policy distillation: advantages from the log-probs of the teacher."""

import torch
from torch import Tensor


def distillation_advantages(
    old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, spans: Tensor | None = None
) -> Tensor:
    """Returns the log-ratio log p_teacher - log p_student of each masked token (...), in nats; 0 elsewhere.

    Minus the "k1" estimate of KL(student || teacher): a policy gradient with it descends the per-token reverse KL
    (on-policy distillation, arXiv:2306.13649).

    Args:
        old_logprobs, teacher_logprobs: (...) nats; the student's are from the start of the iteration.
        mask: (...) bool.
        spans: (...) int64, for teachers of another tokenizer, the span of each token, -1 for none; None: each is one.
    """
    ratios = torch.where(mask, teacher_logprobs - old_logprobs, 0.0).detach()
    if spans is None:
        return ratios
    # Every token of a span gets the span's log-ratio, because each has a part in its probability.
    counted = mask & (spans >= 0)
    totals = ratios.new_zeros(int(spans.max()) + 1 if spans.numel() else 0)
    totals.index_add_(0, spans[counted], ratios[counted])
    return torch.where(counted, totals[spans.clamp(min=0)] if len(totals) else ratios, 0.0)
