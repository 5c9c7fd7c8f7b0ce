"""Log-probabilities and entropy over a vocabulary that is sharded over tensor-parallel ranks, in float32.

Logits are computed for one chunk of tokens at a time, in the forward pass and again in the backward pass: no more than
a chunk of the (tokens, vocabulary) matrix is ever materialized, and the vocabulary is never gathered. Where all tokens
fit in one chunk, its log-probabilities are kept for the backward pass instead.

One autograd function computes log-probs, entropy and divergence, because they share the student's product and the
gradient's. With q = softmax(z) of the student's logits z, the target y, the entropy H, the divergence D and its
derivatives s by log q:

    d log q(y) / dz = [y] - q        d H / dz = -q (log q + H)        d D / dz = s - q sum(s)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl_mg.training.output_layer import OutputLayer, log_normalizer, row_max, scaled, sum_over
from verl_mg.training.vocab_divergence import TeacherTokens
from verl_mg.training.weight_gradients import added_to_buffer, gradient_buffer, wgrad_gemm_accum_fp32

DIVERGENCE_COPIES = 6  # tensors as large as the logits that a chunk needs for a divergence, temporary ones included


def vocab_parallel_logprobs(
    hidden: Tensor, targets: Tensor, layer: OutputLayer, temperature: float, with_entropy: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Computes log p(target) and the entropy of softmax(logits / temperature).

    `hidden` (n, h) is the same on every rank of the group; its gradient is this rank's part, which the caller sums.
    `targets` are (n,), or (n, c) candidates for each token, and the log-probs like them. All in nats and float32.
    """
    candidates = targets if targets.dim() == 2 else targets[:, None]
    logprobs, entropy, _ = _LogProbs.apply(hidden, layer.weight, candidates, layer, temperature, with_entropy, None)
    return logprobs.view(targets.shape), entropy if with_entropy else None


def vocab_parallel_divergence(
    hidden: Tensor, targets: Tensor, layer: OutputLayer, temperature: float, teacher: TeacherTokens
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes log p(target), the entropy, and the divergence from a teacher over the whole vocabulary.

    Each result is (n,), in nats and float32, and has gradients; the teacher has none. `hidden` is as in
    `vocab_parallel_logprobs`.
    """
    outputs = _LogProbs.apply(hidden, layer.weight, targets[:, None], layer, temperature, True, teacher)
    logprobs, entropy, divergence = outputs
    return logprobs.squeeze(1), entropy, divergence


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
        teacher: TeacherTokens | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = hidden.new_empty(targets.shape, dtype=torch.float32)
        entropy = hidden.new_empty(len(hidden), dtype=torch.float32)
        normalizer, divergence = torch.empty_like(entropy), torch.empty_like(entropy)
        of_teacher = torch.empty(2, len(hidden) if teacher else 0, device=hidden.device)  # normalizer, sum of slopes
        ctx.kept = None
        chunks = layer.chunks(len(hidden), DIVERGENCE_COPIES if teacher else 1)
        # With a softcap the backward pass needs the capped logits for the derivative of tanh.
        keeps = len(chunks) == 1 and layer.softcap is None and ctx.needs_input_grad[0]
        for chunk in chunks:
            logits = scaled(layer.logits(hidden[chunk]), temperature)
            local, is_local = layer.local_targets(targets[chunk])
            highest = row_max(logits, layer.group)
            logits -= highest[:, None]
            # All sums over the vocabulary travel in one all-reduce; they are relative to the maxima of the other.
            sums = [_pick(logits, local, is_local).T]
            exponentials = logits.exp() if with_entropy or keeps or teacher else logits.exp_()
            sums += [exponentials.sum(-1)[None]]
            if with_entropy:
                sums += [exponentials.mul_(logits).sum(-1)[None]]
            del exponentials
            summed = sum_over(torch.cat(sums), layer.group)
            picked, total = summed[: targets.shape[1]], summed[targets.shape[1]]
            logarithm = total.log()
            normalizer[chunk] = highest + logarithm
            logprobs[chunk] = (picked - logarithm).T
            if with_entropy:
                entropy[chunk] = logarithm - summed[-1] / total
            if keeps or teacher:
                logits.sub_(logarithm[:, None])
            if teacher:
                theirs = teacher.logits(chunk, temperature)
                of_teacher[0, chunk] = log_normalizer(theirs, layer.group)
                theirs -= of_teacher[0, chunk, None]
                terms = teacher.divergence.terms(theirs, logits).sum(-1)
                slopes = teacher.divergence.slopes(theirs, logits).sum(-1)
                divergence[chunk], of_teacher[1, chunk] = sum_over(torch.stack([terms, slopes]), layer.group)
                del theirs
            if keeps:
                ctx.kept = logits
            del logits
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy, of_teacher)
        ctx.layer, ctx.temperature, ctx.teacher, ctx.chunks = layer, temperature, teacher, chunks
        ctx.buffer = gradient_buffer(weight, layer.fused_gradient)
        # Outputs without a gradient arrive as None, and their terms are left out of the backward pass.
        ctx.set_materialize_grads(False)
        return logprobs, entropy, divergence

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy, of_teacher = ctx.saved_tensors
        layer, temperature, teacher = ctx.layer, ctx.temperature, ctx.teacher
        # The derivative of logits / temperature is applied to the numbers of a token, not to its logits.
        grad_logprobs, grad_entropy, grad_divergence = (None if g is None else g / temperature for g in gradients)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(targets, dtype=torch.float32)
        grad_total = grad_logprobs.sum(1)
        grad_hidden = torch.empty_like(hidden)
        buffer = ctx.buffer if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[1] and buffer is None:
            buffer = torch.zeros_like(weight, dtype=torch.float32)
        kept, ctx.kept = ctx.kept, None
        for chunk in ctx.chunks:
            slope = None
            if kept is None:
                capped = layer.logits(hidden[chunk])
                slope = None if layer.softcap is None else 1 - (capped / layer.softcap) ** 2  # of tanh
                grad_logits = scaled(capped, temperature).sub_(normalizer[chunk, None])
            else:
                grad_logits = kept
            of_divergence = None
            if grad_divergence is not None:
                theirs = teacher.logits(chunk, temperature).sub_(of_teacher[0, chunk, None])
                of_divergence = teacher.divergence.slopes(theirs, grad_logits)
                del theirs
                of_divergence -= grad_logits.exp().mul_(of_teacher[1, chunk, None])
                of_divergence *= grad_divergence[chunk, None]
            # In place: `grad_logits` begins as log-probs, from which the slopes above were computed.
            # d log q(y) / dz = [y] - q;  d H / dz = -q (log q + H)
            if grad_entropy is None:
                grad_logits.exp_().mul_(-grad_total[chunk, None])
            else:
                probabilities = grad_logits.exp()
                grad_logits.add_(entropy[chunk, None]).mul_(-grad_entropy[chunk, None])
                grad_logits.sub_(grad_total[chunk, None]).mul_(probabilities)
            local, is_local = layer.local_targets(targets[chunk])
            if layer.real_rows:
                grad_logits.scatter_add_(1, local, grad_logprobs[chunk] * is_local)
            if of_divergence is not None:
                grad_logits += of_divergence
            if slope is not None:
                grad_logits *= slope
            if layer.scale != 1:
                grad_logits *= layer.scale
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, weight[: layer.real_rows], out=grad_hidden[chunk])
            if buffer is not None:
                wgrad_gemm_accum_fp32(hidden[chunk], grad_logits, buffer[: layer.real_rows])
        return grad_hidden, _weight_gradient(weight, buffer, ctx.buffer), *[None] * 5


def _weight_gradient(weight: Tensor, sums: Tensor | None, buffer: Tensor | None) -> Tensor | None:
    """Returns the gradient for autograd from float32 sums of all chunks, unless these are in the gradient buffer."""
    if sums is None:
        return None
    return added_to_buffer(weight) if sums is buffer else sums.to(weight.dtype)


def _pick(logits: Tensor, local: Tensor, is_local: Tensor) -> Tensor:
    """Returns the logits of candidates (n, c) that are in this shard, 0 for the others."""
    if logits.shape[1] == 0:
        return logits.new_zeros(local.shape)
    return logits.gather(1, local) * is_local
