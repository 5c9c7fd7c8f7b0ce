"""Per-token estimates of KL(policy || reference) from the log-probabilities of sampled tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from verl_mg.errors import UserError


def _k3(difference: Tensor) -> Tensor:
    # r - 1 - log r with r = reference / policy; expm1 keeps the digits where the two nearly agree.
    return torch.expm1(-difference) + difference


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference: difference,
    "abs": torch.abs,
    "k2": lambda difference: 0.5 * difference.square(),
    "k3": _k3,
}


def penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """One-sample estimate of KL(policy || reference) for tokens that the policy sampled.

    With d = logprobs - ref_logprobs: "k1" d, "abs" |d|, "k2" d^2 / 2, "k3" exp(-d) - 1 + d
    (Schulman, "Approximating KL Divergence", 2020). "k1" and "k3" have the KL as their expectation; "k2" and
    "k3" are never negative. Differentiated as a loss, "k2" has the gradient of the KL in
    expectation, "k1" that of nothing at all.

    Nothing is clamped: "k3" overflows float32 where the reference finds a token e^88 times likelier.
    What stands outside a mask and is no log-probability must be set to 0 before, not after.

    Args:
        logprobs, ref_logprobs: (...) nats, the same shape.
        kind: one of "k1", "abs", "k2", "k3"; UserError for any other.

    Returns:
        (...) nats.
    """
    if kind not in ESTIMATORS:
        raise UserError(f"KL estimator {kind!r} is unknown; write one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[kind](logprobs - ref_logprobs)
