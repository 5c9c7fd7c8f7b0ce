"""On-policy distillation: advantages from the log-probs of the teacher."""

import torch
from torch import Tensor


def distillation_advantages(
    old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, spans: Tensor | None = None
) -> Tensor:
    """Returns the log-ratio of teacher and student for each token that the student wrote.

    Minus the one-sample estimate "k1" of KL(student || teacher) at that token: a policy gradient with it descends the
    per-token reverse KL (on-policy distillation, arXiv:2306.13649). No reward is used, and
    a token does not depend on later ones; add other advantages to combine them.

    With a teacher of another tokenizer the log-ratio is that of a span of text, and all tokens of the span have it:
    each of them has a part in the span's probability.

    Args:
        old_logprobs: (...) nats, of the student at the start of the iteration.
        teacher_logprobs: (...) nats, the same shape.
        mask: (...) bool.
        spans: (...) int64, number of the span of each token, whose log-probs add up; -1 for tokens without one. None:
            each token is a span.

    Returns:
        (...) nats, 0 outside the mask.
    """
    ratios = torch.where(mask, teacher_logprobs - old_logprobs, 0.0).detach()
    if spans is None:
        return ratios
    counted = mask & (spans >= 0)
    totals = ratios.new_zeros(int(spans.max()) + 1 if spans.numel() else 0)
    totals.index_add_(0, spans[counted], ratios[counted])
    return torch.where(counted, totals[spans.clamp(min=0)] if len(totals) else ratios, 0.0)
