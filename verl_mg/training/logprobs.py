"""From hidden states to log-probs, entropies and divergences over a vocabulary that tensor-parallel ranks share.

`TokenOutputs` says what a language model computes for each token that it scores, the same on both backends;
`OutputLayer` computes logits, the functions between them float32 results in nats.

Logits are computed for one chunk of tokens at a time, in the forward pass and again in the backward pass: no more than
a chunk of the (tokens, vocabulary) matrix is ever materialized, and the vocabulary is never gathered. Where all tokens
fit in one chunk, its log-probabilities are kept for the backward pass instead.

One autograd function computes log-probs, entropy and divergence, because they share the student's product and the
gradient's. With q = softmax(z) of the student's logits z, the target y, the entropy H, the divergence D and its
derivatives s by log q:

    d log q(y) / dz = [y] - q        d H / dz = -q (log q + H)        d D / dz = s - q sum(s)

Where tokens were drawn from candidates only, all of this is of the distributions over the candidates: logits of other
tokens are EXCLUDED in the chunks of logits, so that their q and with it their gradient is 0, and nothing else changes.

A teacher's last hidden state of a token has a few thousand numbers, its logits a hundred times as many. So hidden
states travel, and the ranks that train the student have the teacher's output layer, with the vocabulary sharded as
their own: logits of both exist for a chunk of tokens at a time, on the rank that has their rows. A rank reads these
rows from the teacher's directory, and nothing else of the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.algorithms.divergence import Divergence, top_divergence
from verl_mg.checkpoint.hf_safetensors import CheckpointReader
from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.errors import UserError
from verl_mg.training.microbatch import EXCLUDED, TEACHER, TEACHER_HIDDEN, TEACHER_TOP, MicroBatch, Support
from verl_mg.training.weight_gradients import added_to_buffer, gradient_buffer, wgrad_gemm_accum_fp32

# GPU: larger chunks of logits.
# GPU-TEST: tests/training/test_logprobs.py::test_vocab_parallel_logprobs_values_and_gradients_equal_full_logits
# GPU-RAN: h200-1, h100-1
CHUNK_BYTES = {"cuda": 2**30, "cpu": 2**24}
"""Bytes of one chunk of float32 logits on one rank, by the kind of device: large enough for efficient products."""

Extra = Literal["entropy", "squares"] | None
"""Outputs in addition to log-probs: entropies, or the sums of squared probabilities, which have no gradients."""

DIVERGENCE_COPIES = 6  # tensors as large as the logits that a chunk needs for a divergence, temporary ones included


@dataclass(frozen=True)
class OutputLayer:
    """Output layer of one rank, which turns hidden states into log-probabilities."""

    weight: Tensor  # (rows, h), this rank's vocabulary shard
    first_token: int  # token id of the shard's first row
    real_rows: int  # number of rows of the shard that are tokens; the others are padding
    group: dist.ProcessGroup | None  # tensor-parallel ranks; None: the rank has the whole vocabulary
    softcap: float | None = None  # bound c of logits z, as c * tanh(z / c) (Gemma 2, arXiv:2408.00118); None for none
    fused_gradient: bool = False  # add the weight's gradient to its buffer in the product, see `weight_gradients`
    scale: float = 1.0  # factor of the products of hidden states and weights

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the float32 logits (n, real_rows) of hidden states (n, h)."""
        weight = self.weight[: self.real_rows]
        # GPU: the product of 16-bit matrices has a float32 result: sums are not rounded.
        # GPU-TEST: tests/megatron/test_fake_cuda.py::test_train_family_on_cuda_has_values_of_transformers,
        # tests/training/test_logprobs.py::test_vocab_parallel_logprobs_of_bf16_weights_are_float32
        # GPU-RAN: h200-1, h100-1
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

    def chunks(self, tokens: int, copies: int = 1) -> list[slice]:
        """Divides tokens into chunks whose logits have at most CHUNK_BYTES, in `copies` tensors of their size."""
        # By the rows with padding, of which all ranks have equally many: so they take part in equally many collectives.
        size = max(1, CHUNK_BYTES[self.weight.device.type] // (4 * len(self.weight) * copies))
        return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


@dataclass(frozen=True)
class Draw:
    """Distribution that tokens were drawn from, by their logits."""

    temperature: float  # divisor of the logits
    support: Support | None = None  # candidates; None: all of the vocabulary

    def scale(self, logits: Tensor, chunk: slice, layer: OutputLayer, excluded: float = EXCLUDED) -> Tensor:
        """Scales and limits a chunk's logits (tokens, real_rows) of a layer as for the draw, in place."""
        scaled = logits if self.temperature == 1 else logits.div_(self.temperature)
        return self.support.limit(scaled, chunk, layer.first_token, excluded) if self.support else scaled


def row_max(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the largest logit of each token over all shards: (n, real_rows) -> (n,)."""
    # A shard that is all padding has no maximum.
    highest = logits.amax(-1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
    if group is not None and group.size() > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return highest


def sum_over(sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Adds the sums of all shards, in place."""
    if group is not None and group.size() > 1:
        dist.all_reduce(sums, group=group)
    return sums


def log_normalizer(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the logarithm of the sum of exponentials over all shards: (n, real_rows) -> (n,)."""
    highest = row_max(logits, group)
    return highest + sum_over((logits - highest[:, None]).exp_().sum(-1), group).log()


@dataclass(frozen=True)
class OutputHead:
    """Output layer of a language model in its directory."""

    tensor: str
    vocab: int  # number of tokens, padding of the tensor included
    hidden: int  # width of the last hidden states
    softcap: float | None = None  # bound of the logits, see `OutputLayer`
    scale: float = 1.0  # factor of the products of hidden states and weights


@dataclass(frozen=True)
class VocabularyShard:
    """Part of a vocabulary on one rank."""

    first: int  # id of its first token
    rows: int
    group: dist.ProcessGroup | None  # ranks with the other parts; None: the rank has the whole vocabulary


def load_teacher_layer(
    directory: ModelDirectory, head: OutputHead, dtype: torch.dtype, shard: VocabularyShard
) -> OutputLayer:
    """Reads a rank's part of a teacher's output layer."""
    place = device.current_device()
    # Models of one family pad their vocabularies differently: rows after the student's are left out, and the teacher's
    # distribution is over the student's tokens.
    weight = torch.empty(shard.rows, head.hidden, dtype=dtype, device=place)
    if shard.rows:
        reader = CheckpointReader(directory)
        box = ((shard.first, shard.first + shard.rows), (0, head.hidden))
        weight.copy_(reader.read(head.tensor, box))
    return OutputLayer(weight, shard.first, shard.rows, shard.group, head.softcap, scale=head.scale)


def check_vocabularies(teacher: OutputHead, student: OutputHead, key: str) -> None:
    """Checks that a teacher has all tokens of the student."""
    if teacher.vocab < student.vocab:
        raise UserError(
            f"{key}: the teacher has {teacher.vocab} tokens and the student {student.vocab}, to some of which it gives "
            "no probability. Write algorithm.divergence.top_k, or take another teacher."
        )


@dataclass(frozen=True)
class TeacherTokens:
    """Distributions of the tokens that a rank scores, by their teachers' last hidden states."""

    divergence: Divergence
    layers: Sequence[OutputLayer]  # output layer of each teacher, with the rows of the student's shard
    hidden: Tensor  # (m, h) last hidden states of the teachers; a narrower teacher has the first numbers
    teachers: Tensor  # (m,) int64 number of each token's teacher

    def logits(self, chunk: slice, draw: Draw) -> Tensor:
        """Computes the teachers' float32 logits (tokens, real_rows) of a chunk, of the distribution of the draw."""
        if len(self.layers) == 1:
            return draw.scale(_logits(self.layers[0], self.hidden[chunk]), chunk, self.layers[0])
        logits = self.hidden.new_empty(chunk.stop - chunk.start, self.layers[0].real_rows, dtype=torch.float32)
        for number, layer in enumerate(self.layers):
            rows = (self.teachers[chunk] == number).nonzero().flatten()
            logits[rows] = _logits(layer, self.hidden[chunk][rows])
        return draw.scale(logits, chunk, self.layers[0])


def _logits(layer: OutputLayer, hidden: Tensor) -> Tensor:
    width = layer.weight.shape[1]
    return layer.logits(hidden[:, :width].to(layer.weight.dtype))


def vocab_parallel_top(hidden: Tensor, layer: OutputLayer, draw: Draw, k: int) -> tuple[Tensor, Tensor]:
    """Computes the k likeliest tokens of the draw's distribution, first of each shard, then of all.

    Returns their log-probs, (n, k) float32 and falling, and their ids, (n, k); -inf and 0 where it has fewer.
    `hidden` (n, h) is the same on every rank of the group.
    """
    logprobs = hidden.new_empty(len(hidden), k, dtype=torch.float32)
    tokens = torch.empty_like(logprobs, dtype=torch.int64)
    for chunk in layer.chunks(len(hidden)):
        logits = draw.scale(layer.logits(hidden[chunk]), chunk, layer, -torch.inf)
        normalizer = log_normalizer(logits, layer.group)
        values, rows = logits.topk(min(k, layer.real_rows))
        # A shard may have fewer than k real rows: padding of -inf is never among the best.
        missing = (0, k - values.shape[1])
        values = torch.nn.functional.pad(values, missing, value=-torch.inf)
        ids = torch.nn.functional.pad(rows + layer.first_token, missing)
        values, ids = _gathered(values, layer.group), _gathered(ids, layer.group)
        best, places = values.topk(k)
        logprobs[chunk] = best - normalizer[:, None]
        tokens[chunk] = torch.where(best == -torch.inf, 0, ids.gather(1, places))
    return logprobs, tokens


def _gathered(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the columns of all ranks, (n, ranks * k)."""
    if group is None or group.size() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, 1)


def vocab_parallel_logprobs(
    hidden: Tensor,
    targets: Tensor,
    layer: OutputLayer,
    draw: Draw,
    extra: Extra = "entropy",
) -> tuple[Tensor, Tensor | None]:
    """Computes log p(target) of the draw's distribution, and its entropy or its sum of squares.

    `hidden` (n, h) is the same on every rank of the group; its gradient is this rank's part, which the caller sums.
    `targets` are (n,), or (n, c) tokens in the place of each, and the log-probs like them. All in nats and float32.
    log p of a token that was no candidate is near EXCLUDED: the caller leaves it out.
    """
    several = targets if targets.dim() == 2 else targets[:, None]
    logprobs, other, _ = _LogProbs.apply(hidden, layer.weight, several, layer, draw, extra, None)
    return logprobs.view(targets.shape), other if extra else None


def vocab_parallel_divergence(
    hidden: Tensor,
    targets: Tensor,
    layer: OutputLayer,
    draw: Draw,
    teacher: TeacherTokens,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes log p(target), the entropy, and the divergence from a teacher over all that can be drawn.

    Each result is (n,), in nats and float32, and has gradients; the teacher has none. `hidden` is as in
    `vocab_parallel_logprobs`.
    """
    outputs = _LogProbs.apply(hidden, layer.weight, targets[:, None], layer, draw, "entropy", teacher)
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
        draw: Draw,
        extra: Extra,
        teacher: TeacherTokens | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = hidden.new_empty(targets.shape, dtype=torch.float32)
        entropy = hidden.new_empty(len(hidden), dtype=torch.float32)  # or the sums of squares
        normalizer, divergence = torch.empty_like(entropy), torch.empty_like(entropy)
        of_teacher = torch.empty(2, len(hidden) if teacher else 0, device=hidden.device)  # normalizer, sum of slopes
        ctx.kept = None
        chunks = layer.chunks(len(hidden), DIVERGENCE_COPIES if teacher else 1)
        # With a softcap the backward pass needs the capped logits for the derivative of tanh.
        keeps = len(chunks) == 1 and layer.softcap is None and ctx.needs_input_grad[0]
        for chunk in chunks:
            logits = draw.scale(layer.logits(hidden[chunk]), chunk, layer)
            local, is_local = layer.local_targets(targets[chunk])
            highest = row_max(logits, layer.group)
            logits -= highest[:, None]
            # All sums over the vocabulary travel in one all-reduce; they are relative to the maxima of the other.
            sums = [_pick(logits, local, is_local).T]
            exponentials = logits.exp() if extra == "entropy" or keeps or teacher else logits.exp_()
            sums += [exponentials.sum(-1)[None]]
            if extra:
                factor = logits if extra == "entropy" else exponentials
                sums += [exponentials.mul_(factor).sum(-1)[None]]
            del exponentials
            summed = sum_over(torch.cat(sums), layer.group)
            picked, total = summed[: targets.shape[1]], summed[targets.shape[1]]
            logarithm = total.log()
            normalizer[chunk] = highest + logarithm
            logprobs[chunk] = (picked - logarithm).T
            if extra == "entropy":
                entropy[chunk] = logarithm - summed[-1] / total
            elif extra:
                entropy[chunk] = summed[-1] / total**2
            if keeps or teacher:
                logits.sub_(logarithm[:, None])
            if teacher:
                theirs = teacher.logits(chunk, draw)
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
        ctx.layer, ctx.draw, ctx.teacher, ctx.chunks = layer, draw, teacher, chunks
        ctx.buffer = gradient_buffer(weight, layer.fused_gradient)
        # Outputs without a gradient arrive as None, and their terms are left out of the backward pass.
        ctx.set_materialize_grads(False)
        if extra == "squares":
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, divergence

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy, of_teacher = ctx.saved_tensors
        layer, draw, teacher = ctx.layer, ctx.draw, ctx.teacher
        # The derivative of logits / temperature is applied to the numbers of a token, not to its logits.
        grad_logprobs, grad_entropy, grad_divergence = (None if g is None else g / draw.temperature for g in gradients)
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
                grad_logits = draw.scale(capped, chunk, layer).sub_(normalizer[chunk, None])
            else:
                grad_logits = kept
            of_divergence = None
            if grad_divergence is not None:
                theirs = teacher.logits(chunk, draw).sub_(of_teacher[0, chunk, None])
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
        grad_weight = None
        if buffer is not None:  # float32 sums of all chunks
            grad_weight = added_to_buffer(weight) if buffer is ctx.buffer else buffer.to(weight.dtype)
        return grad_hidden, grad_weight, *[None] * 5


def _pick(logits: Tensor, local: Tensor, is_local: Tensor) -> Tensor:
    """Returns the logits of candidates (n, c) that are in this shard, 0 for the others."""
    if logits.shape[1] == 0:
        return logits.new_zeros(local.shape)
    return logits.gather(1, local) * is_local


@dataclass(frozen=True)
class TeacherDivergence:
    """Divergence of a student from its teachers, over the whole vocabulary or over the teachers' likeliest tokens."""

    divergence: Divergence
    layers: Sequence[OutputLayer] | None = None
    """Output layers of the teachers on this rank, by their numbers in the column TEACHER; [] where the rank scores no
    tokens. None: only the tokens of the column TEACHER_TOP count, see `TokenOutputs.likeliest`."""

    def of_tokens(self, output: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the divergence of each token, (n,) nats with gradients; `output` as of `TokenOutputs.compute`."""
        if self.layers is not None:
            return output[2]
        return top_divergence(self.divergence, columns[TEACHER_TOP][:, 0], output[2:].T)


@dataclass(frozen=True)
class TokenOutputs:
    """Request to a language model: log-probs, or in place of them what a student needs of its teacher."""

    extra: Extra = "entropy"
    # Compare with teachers, whose columns the micro-batches have; with entropies.
    teacher: TeacherDivergence | None = None
    # Column (2, k) of log-probs and ids of likeliest tokens in the place of each: their log-probs are outputs as well.
    likeliest: str | None = None
    num_likeliest: int = 0  # k, for the column of the outputs
    top: int = 0  # number of likeliest tokens, whose log-probs and ids are the output; 0: they are not
    hidden: int = 0  # size of the last hidden states, which are the output; 0: they are not
    dtype: torch.dtype = torch.float32  # data type of the column of the outputs

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of a token's entry in the column of the outputs: () where it is only a log-prob."""
        if self.hidden:
            return (self.hidden,)
        if self.top:
            return (2, self.top)
        lines = 1 + (self.extra is not None) + self.num_likeliest
        return (lines,) if lines > 1 else ()

    def compute(self, states: Tensor, micro: MicroBatch[Any], layer: OutputLayer, temperature: float) -> Tensor:
        """Computes the outputs (lines, m) in float32 from the last hidden states (m, h) of a rank's tokens.

        Lines are log-probs; entropies, or sums of squares, if requested; then divergences in one line, or log-probs of
        k likeliest tokens in k lines. With `top` 2 k lines, log-probs and ids; with `hidden` h lines.
        """
        if self.hidden:
            return states.T.float()
        draw = Draw(temperature, micro.support)
        if self.top:
            return torch.cat([part.T.float() for part in vocab_parallel_top(states, layer, draw, self.top)])
        if self.teacher is None or self.teacher.layers is None:
            targets = micro.targets[:, None]
            if self.likeliest is not None:
                # Further targets of the same product: one pass over the logits scores all of them.
                targets = torch.cat([targets, micro.local_column(self.likeliest)[:, 1].long()], 1)
            logprobs, other = vocab_parallel_logprobs(states, targets, layer, draw, self.extra)
            return torch.cat([logprobs[:, :1].T, *([] if other is None else [other[None]]), logprobs[:, 1:].T])
        assert self.likeliest is None
        hidden, teachers = micro.local_column(TEACHER_HIDDEN), micro.local_column(TEACHER)
        theirs = TeacherTokens(self.teacher.divergence, self.teacher.layers, hidden, teachers)
        return torch.stack(vocab_parallel_divergence(states, micro.targets, layer, draw, theirs))


LOGPROBS = TokenOutputs(extra=None)  # only log-probs
SQUARES = TokenOutputs(extra="squares")  # log-probs and sums of squared probabilities
EVERYTHING = TokenOutputs()  # log-probs and entropies, which every update reports
