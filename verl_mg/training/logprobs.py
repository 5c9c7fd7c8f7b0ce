"""Log-probabilities and entropy over a vocabulary that is sharded over tensor-parallel ranks, in float32.

Logits are computed for one chunk of tokens at a time, in the forward pass and again in the backward pass: no more than
a chunk of the (tokens, vocabulary) matrix is ever materialized, and the vocabulary is never gathered. Where all tokens
fit in one chunk, its log-probabilities are kept for the backward pass instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.training.weight_gradients import added_to_buffer, gradient_buffer, wgrad_gemm_accum_fp32

CHUNK_BYTES = {"cuda": 2**30, "cpu": 2**24}
"""Bytes of one chunk of float32 logits on one rank, by the kind of device: large enough for efficient products."""


@dataclass(frozen=True)
class OutputLayer:
    """Output layer of one rank, which turns hidden states into log-probabilities."""

    weight: Tensor
    """(rows, h), this rank's vocabulary shard."""
    first_token: int
    """Token id of the shard's first row."""
    real_rows: int
    """Number of rows of the shard that are tokens; the others are padding."""
    group: dist.ProcessGroup | None
    """Tensor-parallel ranks; None for this rank alone."""
    softcap: float | None = None
    """Bound c of logits z, as c * tanh(z / c) (Gemma 2, arXiv:2408.00118); None for none."""
    fused_gradient: bool = False
    """Add the gradient of the weight to its gradient buffer in the product, see `weight_gradients`."""
    scale: float = 1.0
    """Factor of the products of hidden states and weights."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the float32 logits (n, real_rows) of hidden states (n, h)."""
        weight = self.weight[: self.real_rows]
        if hidden.device.type == "cuda" and hidden.dtype is not torch.float32:
            products = torch.mm(hidden, weight.T, out_dtype=torch.float32)  # sums are not rounded
        else:
            products = (hidden @ weight.T).float()
        if self.scale != 1:
            products *= self.scale
        if self.softcap is None:
            return products
        return products.div_(self.softcap).tanh_().mul_(self.softcap)

    def local_targets(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each target's row in this shard (0 where it is in another one), and whether it is in this shard."""
        local = targets - self.first_token
        is_local = (local >= 0) & (local < self.real_rows)
        return torch.where(is_local, local, 0), is_local

    def chunks(self, tokens: int) -> list[slice]:
        """Divides tokens into chunks whose logits have at most CHUNK_BYTES.

        All ranks have the same number of rows, padding included, and therefore the same number of collectives.
        """
        size = max(1, CHUNK_BYTES[self.weight.device.type] // (4 * len(self.weight)))
        return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def vocab_parallel_logprobs(
    hidden: Tensor, targets: Tensor, layer: OutputLayer, temperature: float, with_entropy: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Computes log p(target) and the entropy of softmax(logits / temperature).

    The gradient of `hidden` is this rank's part only: the caller sums it over the group.

    Args:
        hidden: (n, h), the same on every rank of the group.
        targets: (n,) int64 token ids.
        layer: the output layer.
        temperature: sampling temperature, above 0.
        with_entropy: compute entropies, which takes two more passes over the logits.

    Returns:
        Log-probabilities and entropies in nats, each (n,) float32; None in place of entropies that are not computed.
    """
    logprobs, entropy = _LogProbs.apply(hidden, layer.weight, targets, layer, temperature, with_entropy)
    return logprobs, entropy if with_entropy else None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        layer: OutputLayer,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy, normalizer = torch.empty_like(logprobs), torch.empty_like(logprobs)
        ctx.kept = None
        chunks = layer.chunks(len(hidden))
        keeps = len(chunks) == 1 and layer.softcap is None and ctx.needs_input_grad[0]
        for chunk in chunks:
            logits = _scaled(layer.logits(hidden[chunk]), temperature)
            local, is_local = layer.local_targets(targets[chunk])
            highest = _row_max(logits, layer.group)
            logits -= highest[:, None]
            sums = [_pick(logits, local, is_local)]
            exponentials = logits.exp() if with_entropy or keeps else logits.exp_()
            sums += [exponentials.sum(-1)]
            if with_entropy:
                sums += [exponentials.mul_(logits).sum(-1)]
            del exponentials
            target, total, *weighted = _sum_over(torch.stack(sums), layer.group)
            logarithm = total.log()
            normalizer[chunk] = highest + logarithm
            logprobs[chunk] = target - logarithm
            if with_entropy:
                entropy[chunk] = logarithm - weighted[0] / total
            if keeps:
                ctx.kept = logits.sub_(logarithm[:, None])
            del logits
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.layer, ctx.temperature = layer, temperature
        ctx.buffer = gradient_buffer(weight, layer.fused_gradient)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        layer, temperature = ctx.layer, ctx.temperature
        # The derivative of logits / temperature is applied to the numbers of a token, not to its logits.
        grad_logprobs, grad_entropy = (None if grad is None else grad / temperature for grad in gradients)
        grad_logprobs = torch.zeros_like(normalizer) if grad_logprobs is None else grad_logprobs
        grad_hidden = torch.empty_like(hidden)
        buffer = ctx.buffer if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[1] and buffer is None:
            buffer = torch.zeros_like(weight, dtype=torch.float32)
        kept, ctx.kept = ctx.kept, None
        for chunk in layer.chunks(len(hidden)):
            slope = None
            if kept is None:
                capped = layer.logits(hidden[chunk])
                slope = None if layer.softcap is None else 1 - (capped / layer.softcap) ** 2  # of tanh
                grad_logits = _scaled(capped, temperature).sub_(normalizer[chunk, None])
            else:
                grad_logits = kept
            # d logp(y) / dz = [y] - p;  d H / dz = -p (log p + H)
            if grad_entropy is None:
                grad_logits.exp_().mul_(-grad_logprobs[chunk, None])
            else:
                probabilities = grad_logits.exp()
                grad_logits.add_(entropy[chunk, None]).mul_(-grad_entropy[chunk, None])
                grad_logits.sub_(grad_logprobs[chunk, None]).mul_(probabilities)
            local, is_local = layer.local_targets(targets[chunk])
            if layer.real_rows:
                grad_logits.scatter_add_(1, local[:, None], (grad_logprobs[chunk] * is_local)[:, None])
            if slope is not None:
                grad_logits *= slope
            if layer.scale != 1:
                grad_logits *= layer.scale
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, weight[: layer.real_rows], out=grad_hidden[chunk])
            if buffer is not None:
                wgrad_gemm_accum_fp32(hidden[chunk], grad_logits, buffer[: layer.real_rows])
        return grad_hidden, _weight_gradient(weight, buffer, ctx.buffer), *[None] * 4


def _weight_gradient(weight: Tensor, sums: Tensor | None, buffer: Tensor | None) -> Tensor | None:
    """Returns what the backward pass returns for the weight, whose gradient has been added to `sums`."""
    if sums is None:
        return None
    return added_to_buffer(weight) if sums is buffer else sums.to(weight.dtype)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Divides logits by the temperature, in place."""
    return logits if temperature == 1 else logits.div_(temperature)


def _pick(logits: Tensor, local: Tensor, is_local: Tensor) -> Tensor:
    if logits.shape[1] == 0:
        return logits.new_zeros(len(logits))
    return logits.gather(1, local[:, None]).squeeze(1) * is_local


def _row_max(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    # A shard that is all padding has no maximum.
    highest = logits.amax(-1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
    if group is not None and group.size() > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return highest


def _sum_over(sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(sums, group=group)
    return sums
