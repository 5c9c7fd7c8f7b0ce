"""Score centering: a policy gradient without the drift towards another sampler (arXiv:2609.20807, equation 14).

A token that the sampler q drew has the surrogate A w r, with its advantage A, its off-policy weight w, and its ratio
r = p / o of the policy in training p to the one before the update o. At a prefix its expectation under q has the
gradient

    E[A w grad r]  =  Cov(A, w grad r)  +  E[A] grad E[w r]

The second term is drift: it pulls p towards q or away from it, whatever was right, and an engine with other kernels or
older weights repeats it in each update. Centering replaces w r of a token by w r - E[w r], so that only the covariance
is left. Where q is o, E[w r] is the sum of p, and centering does nothing; the same with w = o / q without bounds.

Of q the engine reports the k likeliest tokens, the head. The other tokens count as rho o, the policy's own tail times
one factor, of which the sum of p over the head is enough:

    E[w r]  =  sum over the head of c_v p_v / o_v  +  c_0 (1 - sum over the head of p_v)
    c_v  =  q_v w(o_v / q_v)        c_0  =  rho w(1 / rho)        rho  =  (1 - sum of q) / (1 - sum of o)

Three tokens, q = (.6 .3 .1) and o = (.5 .25 .25), without weights. k = 2: rho = .1 / .25, c = (.4, .6, .3). Before the
first step E[w r] = 1, and its gradient by the log-probs of the head is c_v - c_0 o_v = (.4 .2): of the third token
-.6, since gradients of log-probs have the mean 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_mg.algorithms import kl
from verl_mg.algorithms.losses.policy import Metrics, masked, masked_constant
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

# Sums of float32 probabilities are 1 up to a few 1e-7: smaller tails are rounding, and count as equal.
TAIL = 1e-6


def sampler_probabilities(sampler_logprobs: Tensor, old_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (tokens, 1 + k) rho and the probabilities q of the head, and the log-ratios of o to q, nats.

    Missing entries of the head have the probability and the log-ratio 0.

    Args:
        sampler_logprobs: (tokens, k) log-probs of the head under the sampler, -inf where it has fewer tokens.
        old_logprobs: (tokens, k) log-probs of the same tokens under the policy before the update.
    """
    known = sampler_logprobs.isfinite()
    q, o = (masked(known, logprobs.detach().exp()) for logprobs in (sampler_logprobs, old_logprobs))
    tails = [(1 - part.sum(-1, keepdim=True)).clamp(min=0) + TAIL for part in (q, o)]
    rho = tails[0] / tails[1]
    head = masked(known, old_logprobs.detach() - sampler_logprobs.detach())
    return torch.cat([rho, q], -1), torch.cat([-rho.log(), head], -1)


def expected_weight(
    logprobs: Tensor, old_logprobs: Tensor, sampler_logprobs: Tensor, coefficients: Tensor
) -> tuple[Tensor, Metrics]:
    """Returns (tokens,) E[w r] of the module, with its gradient, and metrics.

    `centering_mass` is the probability that the sampler gives to the head. `centering_drift` is the size of the drift:
    the sum over the vocabulary of the absolute gradients by logits before the first step. Without weights it is twice
    the total variation distance of sampler and policy, as far as the sampler is known; 0 where they are equal.

    Args:
        logprobs: (tokens, k) nats, of the head under the policy in training; only they have a gradient.
        old_logprobs, sampler_logprobs: as in `sampler_probabilities`.
        coefficients: (tokens, 1 + k) c_0 and c_v.
    """
    known = sampler_logprobs.isfinite()
    logprobs, old = masked(known, logprobs), masked_constant(known, old_logprobs)
    tail, head = coefficients[:, 0], coefficients[:, 1:]
    # Beyond the first step r differs from 1; bounded like the ratios of the losses.
    ratios = torch.exp(kl.bounded(logprobs - old))
    probabilities = masked(known, logprobs.exp())
    expected = (head * ratios).sum(-1) + tail * (1 - probabilities.sum(-1))
    o = masked(known, old.exp())
    of_logprobs = head - tail[:, None] * o
    total = of_logprobs.sum(-1)
    of_others = total.abs() * (1 - o.sum(-1)).clamp(min=0)
    drift = (of_logprobs - total[:, None] * o).abs().sum(-1) + of_others
    return expected, {"centering_mass": masked(known, sampler_logprobs.exp()).sum(-1), "centering_drift": drift}
