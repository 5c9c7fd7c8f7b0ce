"""Log-probabilities and entropy over a vocabulary that is sharded over tensor-parallel ranks, in float32.

Logits are computed for one chunk of tokens at a time, in the forward pass and again in the backward pass: the full
(tokens, vocabulary) matrix is never materialized, and the vocabulary is never gathered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""Bytes of one chunk of float32 logits on one rank."""


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    first_token: int,
    real_rows: int,
    group: dist.ProcessGroup,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes log p(target) and the entropy of softmax(hidden @ weight.T / temperature).

    The gradient of `hidden` is this rank's part only: the caller sums it over the group.

    Args:
        hidden: (n, h), the same on every rank of `group`.
        weight: (rows, h), this rank's vocabulary shard.
        targets: (n,) int64 token ids.
        temperature: sampling temperature, above 0.
        first_token: token id of the shard's first row.
        real_rows: number of rows of the shard that are tokens; the others are padding.
        group: tensor-parallel ranks.
        softcap: bound c of logits z before the division, as c * tanh(z / c) (Gemma 2, arXiv:2408.00118); None for none.

    Returns:
        Log-probabilities and entropies in nats, each (n,) float32.
    """
    logprobs, entropy = _LogProbs.apply(hidden, weight, targets, temperature, first_token, real_rows, group, softcap)
    return logprobs, entropy


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        first_token: int,
        real_rows: int,
        group: dist.ProcessGroup,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy, normalizer = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for chunk in _chunks(len(hidden), len(weight)):
            logits = _softcapped(hidden[chunk] @ weight[:real_rows].T, softcap) / temperature
            local, is_local = _local_targets(targets[chunk], first_token, real_rows)
            highest = _row_max(logits, group)
            exponentials = (logits - highest[:, None]).exp()
            sums = torch.stack(
                [
                    exponentials.sum(-1),
                    (exponentials * logits).sum(-1),
                    _pick(logits, local, is_local),
                ]
            )
            dist.all_reduce(sums, group=group)
            total, weighted, target_logit = sums
            normalizer[chunk] = highest + total.log()
            logprobs[chunk] = target_logit - normalizer[chunk]
            entropy[chunk] = normalizer[chunk] - weighted / total
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.constants = (temperature, first_token, real_rows, softcap)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        temperature, first_token, real_rows, softcap = ctx.constants
        grad_logprobs, grad_entropy = gradients
        grad_hidden = torch.zeros_like(hidden)
        trained = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if trained else None
        for chunk in _chunks(len(hidden), len(weight)):
            capped = _softcapped(hidden[chunk] @ weight[:real_rows].T, softcap)
            log_p = capped / temperature - normalizer[chunk, None]
            p = log_p.exp()
            # d logp(y) / dz = [y] - p;  d H / dz = -p (log p + H)
            grad_logits = p * (-grad_logprobs[chunk, None] - grad_entropy[chunk, None] * (log_p + entropy[chunk, None]))
            local, is_local = _local_targets(targets[chunk], first_token, real_rows)
            if real_rows:
                grad_logits.scatter_add_(1, local[:, None], (grad_logprobs[chunk] * is_local)[:, None])
            grad_logits /= temperature
            if softcap is not None:
                grad_logits *= 1 - (capped / softcap) ** 2  # d tanh(x) / dx = 1 - tanh(x)^2
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[chunk] = grad_logits @ weight[:real_rows]
            if grad_weight is not None:
                grad_weight[:real_rows] += grad_logits.T @ hidden[chunk]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 6


def _chunks(tokens: int, rows: int) -> list[slice]:
    # All ranks have the same number of rows, padding included, and therefore the same number of collectives.
    size = max(1, CHUNK_BYTES // (4 * rows))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _softcapped(products: Tensor, softcap: float | None) -> Tensor:
    products = products.float()
    return products if softcap is None else softcap * torch.tanh(products / softcap)


def _local_targets(targets: Tensor, first_token: int, real_rows: int) -> tuple[Tensor, Tensor]:
    """Returns each target's row in this shard (0 where it is in another one), and whether it is in this shard."""
    local = targets - first_token
    is_local = (local >= 0) & (local < real_rows)
    return torch.where(is_local, local, 0), is_local


def _pick(logits: Tensor, local: Tensor, is_local: Tensor) -> Tensor:
    if logits.shape[1] == 0:
        return logits.new_zeros(len(logits))
    return logits.gather(1, local[:, None]).squeeze(1) * is_local


def _row_max(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    # A shard that is all padding has no maximum.
    highest = logits.amax(-1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return highest
