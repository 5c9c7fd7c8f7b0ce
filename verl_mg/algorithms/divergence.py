"""Divergences of a student's distribution q from a teacher's distribution p of the next token.

Each is a sum over tokens v of a term of only log p(v) and log q(v), so that a part of the vocabulary contributes its
part of the sum. With m = beta p + (1 - beta) q:

    kind       divergence                              source
    "reverse"  KL(q || p)                              MiniLLM, arXiv:2306.08543; on-policy distillation
    "forward"  KL(p || q)                              arXiv:1503.02531
    "js"       beta KL(p || m) + (1 - beta) KL(q || m) generalized Jensen-Shannon: GKD, arXiv:2306.13649, equation 1
    "skew_forward"  KL(p || beta p + (1 - beta) q)     DistiLLM, arXiv:2402.03898, equation 3
    "skew_reverse"  KL(q || (1 - beta) p + beta q)     DistiLLM, section 3.1
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveInt

from verl_mg.config import ConfigSection
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

DivergenceKind = Literal["reverse", "forward", "js", "skew_forward", "skew_reverse"]
MIN_TAIL = 1e-7
"""Smallest probability of all tokens outside the likeliest ones: float32 has no number nearer to 1 than that."""


class Divergence(ConfigSection):
    """Divergence of the student from its teacher, for each token of a response."""

    kind: DivergenceKind = "reverse"
    """Kind. reverse: KL of the student from the teacher, which gives up modes. forward: KL of the teacher from the
    student, which covers them. js: generalized Jensen-Shannon (GKD). skew_forward, skew_reverse: KL from a mixture of
    the two (DistiLLM)."""
    beta: float = Field(0.5, gt=0, lt=1)
    """Weight in the mixture of js, skew_forward and skew_reverse."""
    top_k: PositiveInt | None = None
    """Number of tokens that count, the likeliest ones of the teacher. null: the whole vocabulary, for which the actor
    has a copy of the teacher's output layer."""
    tail: Literal["bucket", "renormalized"] = "bucket"
    """Treatment of all other tokens with `top_k`. bucket: they count as one token. renormalized: they do not count, and
    the probabilities of the k tokens are divided by their sum."""

    def terms(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Returns (...) the terms whose sum over the vocabulary is the divergence, in nats.

        Args:
            teacher, student: (...) log p and log q, in nats.
        """
        if self.kind == "forward":
            return teacher.exp() * (teacher - student)
        if self.kind == "reverse":
            return student.exp() * (student - teacher)
        mixture = self._mixture(teacher, student)
        of_teacher, of_student = self._weights
        terms = torch.zeros_like(student)
        if of_teacher:
            terms = terms + of_teacher * teacher.exp() * (teacher - mixture)
        if of_student:
            terms = terms + of_student * student.exp() * (student - mixture)
        return terms

    def slopes(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Returns (...) derivatives of the terms by log q; by logit v it is slope(v) - q(v) times the sum of slopes.

        Args:
            teacher, student: (...) log p and log q, in nats.
        """
        if self.kind == "forward":
            return -teacher.exp()
        probabilities = student.exp()
        if self.kind == "reverse":
            return probabilities * (student - teacher + 1)
        mixture = self._mixture(teacher, student)
        if self.kind == "js":  # what the mixture adds to both parts cancels out
            return (1 - self.beta) * probabilities * (student - mixture)
        share = (student - mixture).exp()  # q / m
        if self.kind == "skew_forward":
            return -(1 - self.beta) * teacher.exp() * share
        return probabilities * (student - mixture + 1 - self.beta * share)

    @property
    def _weights(self) -> tuple[float, float]:
        """Factors of KL(p || mixture) and KL(q || mixture)."""
        return {"js": (self.beta, 1 - self.beta), "skew_forward": (1.0, 0.0), "skew_reverse": (0.0, 1.0)}[self.kind]

    def _mixture(self, teacher: Tensor, student: Tensor) -> Tensor:
        of_teacher, of_student = log_shares(self.kind, self.beta)
        return torch.logaddexp(teacher + of_teacher, student + of_student)


def log_shares(kind: str | None, beta: float) -> tuple[float, float]:
    """Returns the logarithms of the shares of teacher and student in a mixture.

    Args:
        kind, beta: as of `Divergence`.
    """
    of_teacher = 1 - beta if kind == "skew_reverse" else beta
    return math.log(of_teacher), math.log(1 - of_teacher)


def top_divergence(divergence: Divergence, teacher: Tensor, student: Tensor) -> Tensor:
    """Returns (n,) a divergence from log-probs of only a few tokens, such as the teacher's k likeliest, in nats.

    "bucket": all other tokens are one, with the probability that is left. The result is a lower bound of the
    divergence over the whole vocabulary, and equal to it where p / q is the same for all of them (data processing
    inequality). "renormalized": both distributions are conditioned on the k tokens (arXiv:1902.10461), and the
    probability of the others is not constrained.

    Args:
        divergence: kind and treatment of the tail.
        teacher: (n, k) log p, in nats; -inf in place of tokens where there are fewer than k.
        student: (n, k) log q of the same tokens, in nats, with a gradient.
    """
    absent = teacher == -torch.inf
    sides = [torch.where(absent, -torch.inf, side) for side in (teacher, student)]
    totals = [side.logsumexp(-1, keepdim=True) for side in sides]
    if divergence.tail == "renormalized":
        logs = [side - total for side, total in zip((teacher, student), totals, strict=True)]
    else:
        rests = [torch.log(-torch.expm1(total.clamp(max=-MIN_TAIL))) for total in totals]
        logs = [torch.cat([side, rest], -1) for side, rest in zip((teacher, student), rests, strict=True)]
        absent = torch.nn.functional.pad(absent, (0, 1))
    # Where there is no token nothing is added; any finite number keeps the gradient finite.
    filled = [torch.where(absent, 0.0, side) for side in logs]
    return torch.where(absent, 0.0, divergence.terms(*filled)).sum(-1)
