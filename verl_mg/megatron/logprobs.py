"""Log-probabilities and entropy over a vocabulary that is split over the tensor-parallel ranks, in fp32.

Logits are made a chunk of tokens at a time, in the forward pass and again in the backward pass, so that the
full (tokens, vocabulary) matrix never stands; the vocabulary is never gathered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""Room for one chunk of fp32 logits on one rank."""


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
    """log p(target) and the entropy (nats) of softmax(hidden @ weight.T / temperature), each (n,) float32.

    softcap: products are bent before the division, z to softcap * tanh(z / softcap) (Gemma 2, arXiv:2408.00118).

    hidden (n, h), the same on every rank of `group`; weight (rows, h), this rank's vocabulary shard, of which the
    first `real_rows` are tokens first_token, first_token + 1, ... and the rest padding; targets (n,) int64.
    The gradient of `hidden` is this rank's part only: the caller sums it over the group.
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
            logits = _bent(hidden[chunk] @ weight[:real_rows].T, softcap) / temperature
            chosen, here = _own_targets(targets[chunk], first_token, real_rows)
            highest = _highest(logits, group)
            exponentials = (logits - highest[:, None]).exp()
            sums = torch.stack(
                [
                    exponentials.sum(-1),
                    (exponentials * logits).sum(-1),
                    _pick(logits, chosen, here),
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
        of_logprobs, of_entropy = gradients
        of_hidden = torch.zeros_like(hidden)
        trained = ctx.needs_input_grad[1]
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if trained else None
        for chunk in _chunks(len(hidden), len(weight)):
            bent = _bent(hidden[chunk] @ weight[:real_rows].T, softcap)
            log_p = bent / temperature - normalizer[chunk, None]
            p = log_p.exp()
            # d logp(y) / dz = [y] - p;  d H / dz = -p (log p + H)
            of_logits = p * (-of_logprobs[chunk, None] - of_entropy[chunk, None] * (log_p + entropy[chunk, None]))
            chosen, here = _own_targets(targets[chunk], first_token, real_rows)
            if real_rows:
                of_logits.scatter_add_(1, chosen[:, None], (of_logprobs[chunk] * here)[:, None])
            of_logits /= temperature
            if softcap is not None:
                of_logits *= 1 - (bent / softcap) ** 2  # d tanh(x) / dx = 1 - tanh(x)^2
            of_logits = of_logits.to(hidden.dtype)
            of_hidden[chunk] = of_logits @ weight[:real_rows]
            if of_weight is not None:
                of_weight[:real_rows] += of_logits.T @ hidden[chunk]
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), *[None] * 6


def _chunks(tokens: int, rows: int) -> list[slice]:
    # All ranks have equally many rows, padding included, so they meet in the same collectives.
    size = max(1, CHUNK_BYTES // (4 * rows))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _bent(products: Tensor, softcap: float | None) -> Tensor:
    products = products.float()
    return products if softcap is None else softcap * torch.tanh(products / softcap)


def _own_targets(targets: Tensor, first_token: int, real_rows: int) -> tuple[Tensor, Tensor]:
    """Each target's column in this shard (0 where it is not here), and whether it is here."""
    local = targets - first_token
    here = (local >= 0) & (local < real_rows)
    return torch.where(here, local, 0), here


def _pick(logits: Tensor, chosen: Tensor, here: Tensor) -> Tensor:
    if logits.shape[1] == 0:
        return logits.new_zeros(len(logits))
    return logits.gather(1, chosen[:, None]).squeeze(1) * here


def _highest(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    # A shard of nothing but padding has no maximum of its own.
    highest = logits.amax(-1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return highest
