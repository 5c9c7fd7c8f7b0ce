"""From hidden states to log-probs, entropies and divergences over a vocabulary that tensor-parallel ranks share.

`TokenOutputs` says what a language model computes for each token that it scores, the same on both backends;
`OutputLayer` computes products, `vocabulary_rows` turns them into logits and float32 results in nats.

No more than a chunk of the (tokens, vocabulary) matrix is ever materialized, and the vocabulary is never gathered. The
forward pass has chunks of tokens, whose sums over the vocabulary are complete; the backward pass computes logits again
in blocks of the vocabulary, of all tokens, so that each row of the weight's gradient is written once:

    forward, 3 chunks        backward, 3 blocks           added up over blocks, in float32
    v v v v v v              v v | v v | v v              gradient of hidden states   n h numbers
    -----------              v v | v v | v v              ... of weights, if over chunks of tokens   v h numbers
    v v v v v v              v v | v v | v v
    -----------              v v | v v | v v              with n tokens, mostly fewer than v of the vocabulary
    v v v v v v              v v | v v | v v

Where all tokens fit in one chunk, its logits are kept for the backward pass instead.

One autograd function computes log-probs, entropy and divergence, because they share the student's product and the
gradient's.

Where tokens were drawn from candidates only, all of this is of the distributions over the candidates: logits of other
tokens are EXCLUDED, so that their q and with it their gradient is 0, and nothing else changes.

A teacher's last hidden state of a token has a few thousand numbers, its logits a hundred times as many. So hidden
states travel, and the ranks that train the student have the teacher's output layer, with the vocabulary sharded as
their own: logits of both exist for a chunk of tokens at a time, on the rank that has their rows. A rank reads these
rows from the teacher's directory, and nothing else of the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.algorithms.divergence import Divergence, top_divergence
from verl_mg.checkpoint.hf_safetensors import CheckpointReader
from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.errors import UserError
from verl_mg.training.microbatch import TEACHER, TEACHER_HIDDEN, TEACHER_TOP, MicroBatch
from verl_mg.training.output_layer import Draw, OutputLayer
from verl_mg.training.vocabulary_rows import Extra, RowGradient, Rows, TeacherGradient, TorchRows, combine, lines
from verl_mg.training.weight_gradients import added_to_buffer, gradient_buffer, wgrad_gemm_accum_fp32


def rows_on(device: torch.device) -> type[Rows]:
    """Returns the implementation for tensors of a device."""
    # GPU: one kernel of Triton computes the sums of a row, one its divergence, and one its gradient.
    # GPU-TEST: tests/training/test_vocabulary_kernels.py, tests/megatron/test_fake_cuda.py
    # GPU-RAN: not yet
    if device.type != "cuda":
        return TorchRows
    from verl_mg.training.vocabulary_kernels import TritonRows

    return TritonRows


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

    def rows(self, chunk: slice, draw: Draw) -> Rows:
        """Returns the teachers' rows of a chunk of tokens, of the distribution of the draw."""
        kind, first = rows_on(self.hidden.device), self.layers[0]
        if len(self.layers) == 1:
            return kind(first.products(self._inputs(first, self.hidden[chunk])), first, draw, chunk)
        logits = self.hidden.new_empty(chunk.stop - chunk.start, first.real_rows, dtype=torch.float32)
        for number, layer in enumerate(self.layers):
            rows = (self.teachers[chunk] == number).nonzero().flatten()
            logits[rows] = layer.logits(self._inputs(layer, self.hidden[chunk][rows]))
        return kind(logits, replace(first, softcap=None, scale=1.0), draw, chunk)

    def part(self, rows: slice) -> TeacherTokens:
        """Returns the same with a part of the vocabulary."""
        return replace(self, layers=[layer.part(rows) for layer in self.layers])

    @staticmethod
    def _inputs(layer: OutputLayer, hidden: Tensor) -> Tensor:
        return hidden[:, : layer.weight.shape[1]].to(layer.weight.dtype)


def vocab_parallel_top(hidden: Tensor, layer: OutputLayer, draw: Draw, k: int) -> tuple[Tensor, Tensor]:
    """Computes the k likeliest tokens of the draw's distribution, first of each shard, then of all.

    Returns their log-probs, (n, k) float32 and falling, and their ids, (n, k); -inf and 0 where it has fewer.
    `hidden` (n, h) is the same on every rank of the group.
    """
    logprobs = hidden.new_empty(len(hidden), k, dtype=torch.float32)
    tokens = torch.empty_like(logprobs, dtype=torch.int64)
    for chunk in layer.chunks(len(hidden)):
        logits = draw.scale(layer.logits(hidden[chunk]), chunk, layer, -torch.inf)
        values, rows = logits.topk(min(k, layer.real_rows))
        rows_of_draw = rows_on(hidden.device)(logits, replace(layer, softcap=None, scale=1.0), Draw(1.0), chunk)
        normalizer = _normalizer(rows_of_draw, chunk, layer, False).sum(0)
        # A shard may have fewer than k real rows: padding of -inf is never among the best.
        missing = (0, k - values.shape[1])
        values = torch.nn.functional.pad(values, missing, value=-torch.inf)
        ids = torch.nn.functional.pad(rows + layer.first_token, missing)
        values, ids = _gathered(values, layer.group), _gathered(ids, layer.group)
        best, places = values.topk(k)
        logprobs[chunk] = best - normalizer[:, None]
        tokens[chunk] = torch.where(best == -torch.inf, 0, ids.gather(1, places))
    return logprobs, tokens


def _normalizer(rows: Rows, tokens: slice, layer: OutputLayer, reused: bool) -> Tensor:
    """Returns the normalizer of rows without targets, see `vocabulary_rows.Outputs`; reused: as of `Rows.sums`."""
    targets = torch.empty(tokens.stop - tokens.start, 0, dtype=torch.int64, device=layer.weight.device)
    sums = torch.empty(lines(None), len(targets), device=targets.device)
    rows.sums(targets, None, sums, reused)
    return combine(sums, targets, None, layer).normalizer


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
        kind, count = rows_on(hidden.device), len(hidden)
        sums = torch.empty(lines(extra) + targets.shape[1], count, device=hidden.device)
        logprobs = torch.empty(targets.shape, device=hidden.device)
        normalizer, of_teacher = (torch.empty(2, count, device=hidden.device) for _ in range(2))
        other, divergence, slopes = (torch.empty(count, device=hidden.device) for _ in range(3))

        def fill(tokens: slice) -> None:
            result = combine(sums[:, tokens], targets[tokens], extra, layer)
            normalizer[:, tokens], logprobs[tokens] = result.normalizer, result.logprobs
            if result.other is not None:
                other[tokens] = result.other

        chunks = layer.chunks(count, kind.copies_with_teacher if teacher else kind.copies)
        keeps = len(chunks) == 1 and ctx.needs_input_grad[0]
        ctx.kept = None
        for chunk in chunks:
            rows = kind(layer.products(hidden[chunk]), layer, draw, chunk, keeps)
            rows.sums(targets[chunk], extra, sums[:, chunk], keeps or teacher is not None)
            if teacher:  # terms of the divergence need the log-probs of both
                fill(chunk)
                rows.normalize(normalizer[:, chunk])
                theirs = teacher.rows(chunk, draw)
                of_teacher[:, chunk] = _normalizer(theirs, chunk, layer, True)
                theirs.normalize(of_teacher[:, chunk])
                parts = rows.divergence(theirs, teacher.divergence, (normalizer[:, chunk], of_teacher[:, chunk]))
                if layer.group is not None and layer.group.size() > 1:
                    dist.all_reduce(parts, group=layer.group)
                divergence[chunk], slopes[chunk] = parts
                del theirs
            if keeps:
                ctx.kept = rows
            del rows
        if teacher is None and count:
            # All tokens together: two collectives for a micro-batch.
            fill(slice(0, count))
            if ctx.kept is not None:
                ctx.kept.normalize(normalizer)
        ctx.save_for_backward(hidden, weight, targets, normalizer, other, of_teacher, slopes)
        ctx.layer, ctx.draw, ctx.teacher, ctx.kind = layer, draw, teacher, kind
        ctx.buffer = gradient_buffer(weight, layer.fused_gradient)
        # Outputs without a gradient arrive as None, and their terms are left out of the backward pass.
        ctx.set_materialize_grads(False)
        if extra == "squares":
            ctx.mark_non_differentiable(other)
        return logprobs, other, divergence

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, other, of_teacher, slopes = ctx.saved_tensors
        layer, draw, kind, teacher = ctx.layer, ctx.draw, ctx.kind, ctx.teacher
        # The derivative of logits / temperature is applied to the numbers of a token, not to its logits.
        of_logprobs, of_entropy, of_divergence = (
            None if each is None else (each / draw.temperature).contiguous() for each in gradients
        )
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(targets, dtype=torch.float32)
        if of_divergence is None:
            teacher = None
        wanted = RowGradient(normalizer, targets, of_logprobs, other, of_entropy)
        every = slice(0, len(hidden))
        kept, ctx.kept = ctx.kept, None
        blocks = [slice(0, layer.real_rows)]
        if kept is None:
            blocks = layer.blocks(len(hidden), kind.copies_with_teacher if teacher else kind.copies)
        # With several blocks a sum in float32; one block is a product.
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32 if len(blocks) != 1 else hidden.dtype)
        grad_weight = None
        if ctx.needs_input_grad[1] and ctx.buffer is None:
            grad_weight = torch.empty_like(weight)
            grad_weight[layer.real_rows :] = 0
        for block in blocks:
            part, rows = layer.part(block), kept
            if rows is None:
                rows = kind(part.products(hidden), part, draw, every, learns=True)
                rows.normalize(normalizer)
            if teacher is not None and of_divergence is not None:
                theirs = teacher.part(block).rows(every, draw)
                theirs.normalize(of_teacher)
                of_kind = TeacherGradient(theirs, teacher.divergence, of_teacher, slopes, of_divergence)
                wanted = replace(wanted, teacher=of_kind)
                del theirs
            grad_logits = rows.gradient(wanted, hidden.dtype)
            del rows
            if len(blocks) == 1:
                torch.mm(grad_logits, part.weight, out=grad_hidden)
            else:
                wgrad_gemm_accum_fp32(part.weight, grad_logits.T, grad_hidden)
            if grad_weight is not None:
                torch.mm(grad_logits.T, hidden, out=grad_weight[block])
            elif ctx.needs_input_grad[1]:
                wgrad_gemm_accum_fp32(hidden, grad_logits, ctx.buffer[block])
        if ctx.needs_input_grad[1] and grad_weight is None:
            grad_weight = added_to_buffer(weight)
        return grad_hidden.to(hidden.dtype), grad_weight, *[None] * 5


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
