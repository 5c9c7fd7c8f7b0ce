"""Kernels of Triton for rows of logits, see `vocabulary_rows`: each reads the products of a row once.

A product x of a hidden state and a weight becomes the logit of the draw in registers: factor * x, or with a softcap
cap * tanh(factor * x); EXCLUDED where the token was no candidate. Nothing else of the size of the logits exists but
their gradient, in the data type of the hidden states. For n tokens and v tokens of the vocabulary in 16 bits:

    kernel        reads                         writes            programs
    sums          4 n v bytes                   12 n and more     a row each
    divergence    8 n v bytes, the teacher's    8 n               a row each
    gradient      4 n v, 8 n v with a teacher   2 n v             a row and BLOCK columns each

and n v / 8 bytes of candidates where the draw was limited. They are operators of torch, so that profiles name them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_mg.algorithms.divergence import Divergence, log_shares
from verl_mg.training.microbatch import BITS, EXCLUDED
from verl_mg.training.output_layer import Draw, OutputLayer, aligned_empty
from verl_mg.training.vocabulary_rows import HIGHEST, LOWEST, OTHER, TOTAL, Extra, RowGradient, Rows

BLOCK = 4096  # columns that a program has in registers at the same time
WARPS = 8

_BITS, _EXCLUDED, _LOWEST = tl.constexpr(BITS), tl.constexpr(EXCLUDED), tl.constexpr(LOWEST)
_HIGHEST, _TOTAL, _OTHER = tl.constexpr(HIGHEST), tl.constexpr(TOTAL), tl.constexpr(OTHER)


@triton.jit
def _tanh(x):
    # The quotient has no accurate digits near 0, the series no convergence far from it.
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    power = tl.exp(-2 * tl.abs(x))
    quotient = (1 - power) / (1 + power)
    return tl.where(square < 0.0625, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def _logits(products, bits, columns, inside, factor, cap, is_capped: tl.constexpr, is_limited: tl.constexpr):
    """Returns logits, and the derivative of tanh."""
    z = tl.load(products + columns, mask=inside, other=0.0) * factor
    slope = 1.0
    if is_capped:
        z = _tanh(z)
        slope = 1 - z * z
        z = z * cap
    if is_limited:
        word = tl.load(bits + columns // _BITS, mask=inside, other=0)
        z = tl.where((word >> (columns % _BITS)) & 1 != 0, z, _EXCLUDED)
    return tl.where(inside, z, _LOWEST), slope


@triton.jit
def _sums(
    products, stride, bits, words, targets, count, out, line, rows, first, factor, cap,
    kind: tl.constexpr, is_capped: tl.constexpr, is_limited: tl.constexpr, lanes: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    bits += row * words
    out += row
    places = tl.arange(0, size // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    # Each thread has its own maximum and sums for the four columns of a load: it exchanges nothing with others until
    # the end, and scales once for four exponentials.
    highest = tl.full([size // 4], _LOWEST, tl.float32)
    total, other = tl.zeros([size // 4], tl.float32), tl.zeros([size // 4], tl.float32)
    for start in range(0, rows, size):
        columns = start + places
        z, _ = _logits(products, bits, columns, columns < rows, factor, cap, is_capped, is_limited)
        largest = tl.maximum(highest, tl.max(z, 1))
        shift = highest - largest
        shrink = tl.exp(shift)
        relative = z - largest[:, None]
        exponentials = tl.exp(relative)
        if kind == "entropy":
            other = shrink * (other + shift * total) + tl.sum(exponentials * relative, 1)
        if kind == "squares":
            other = shrink * shrink * other + tl.sum(exponentials * exponentials, 1)
        total = shrink * total + tl.sum(exponentials, 1)
        highest = largest
    largest = tl.max(highest, 0)
    shift = highest - largest
    shrink = tl.exp(shift)
    tl.store(out + _HIGHEST * line, largest)
    tl.store(out + _TOTAL * line, tl.sum(total * shrink, 0))
    if kind == "entropy":
        tl.store(out + _OTHER * line, tl.sum((other + shift * total) * shrink, 0))
    if kind == "squares":
        tl.store(out + _OTHER * line, tl.sum(other * shrink * shrink, 0))
    if lanes > 0:
        numbers = tl.arange(0, lanes)
        chosen = tl.load(targets + row * count + numbers, mask=numbers < count, other=-1) - first
        is_local = (numbers < count) & (chosen >= 0) & (chosen < rows)
        z, _ = _logits(products, bits, chosen, is_local, factor, cap, is_capped, is_limited)
        skipped = 2 if kind is None else 3
        tl.store(out + (skipped + numbers) * line, tl.where(is_local, z - largest, 0.0), mask=numbers < count)


@triton.jit
def _log_of_sum(a, b):
    return tl.maximum(a, b) + tl.log(1 + tl.exp(-tl.abs(a - b)))


@triton.jit
def _terms(p, q, beta, of_p, of_q, kind: tl.constexpr):
    """Returns terms and slopes of a divergence, see `algorithms.divergence`; p, q: log-probs of teacher and student."""
    of_teacher, of_student = tl.exp(p), tl.exp(q)
    if kind == "forward":
        terms, slopes = of_teacher * (p - q), -of_teacher
    elif kind == "reverse":
        terms, slopes = of_student * (q - p), of_student * (q - p + 1)
    else:
        mixture = _log_of_sum(p + of_p, q + of_q)
        if kind == "js":
            slopes = (1 - beta) * of_student * (q - mixture)
            terms = beta * of_teacher * (p - mixture) + slopes
        elif kind == "skew_forward":
            terms, slopes = of_teacher * (p - mixture), -(1 - beta) * of_teacher * tl.exp(q - mixture)
        else:
            terms = of_student * (q - mixture)
            slopes = terms + of_student * (1 - beta * tl.exp(q - mixture))
    return terms, slopes


@triton.jit
def _divergence(
    products, stride, bits, words, normalizer, teacher, teacher_stride, teacher_normalizer, out, line, rows,
    factor, cap, teacher_factor, teacher_cap, beta, of_p, of_q,
    kind: tl.constexpr, is_capped: tl.constexpr, teacher_is_capped: tl.constexpr, is_limited: tl.constexpr,
    size: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    teacher += row * teacher_stride
    bits += row * words
    highest, logarithm = tl.load(normalizer + row), tl.load(normalizer + line + row)
    teacher_highest, teacher_logarithm = tl.load(teacher_normalizer + row), tl.load(teacher_normalizer + line + row)
    places = tl.arange(0, size)
    sum_of_terms, sum_of_slopes = tl.zeros([size], tl.float32), tl.zeros([size], tl.float32)
    for start in range(0, rows, size):
        columns = start + places
        inside = columns < rows
        q, _ = _logits(products, bits, columns, inside, factor, cap, is_capped, is_limited)
        p, _ = _logits(teacher, bits, columns, inside, teacher_factor, teacher_cap, teacher_is_capped, is_limited)
        q, p = q - highest - logarithm, p - teacher_highest - teacher_logarithm
        terms, slopes = _terms(p, q, beta, of_p, of_q, kind)
        sum_of_terms += tl.where(inside, terms, 0.0)
        sum_of_slopes += tl.where(inside, slopes, 0.0)
    tl.store(out + row, tl.sum(sum_of_terms, 0))
    tl.store(out + line + row, tl.sum(sum_of_slopes, 0))


@triton.jit
def _gradient(
    products, stride, bits, words, normalizer, targets, count, of_logprobs, of_all, entropy, of_entropy,
    teacher, teacher_stride, teacher_normalizer, of_divergence, slopes_of_row, out, out_stride, line, rows, first,
    factor, cap, scale, teacher_factor, teacher_cap, beta, of_p, of_q,
    has_entropy: tl.constexpr, kind: tl.constexpr, is_capped: tl.constexpr, teacher_is_capped: tl.constexpr,
    is_limited: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * size
    columns = start + tl.arange(0, size)
    inside = columns < rows
    bits += row * words
    z, slope = _logits(products + row * stride, bits, columns, inside, factor, cap, is_capped, is_limited)
    q = z - tl.load(normalizer + row) - tl.load(normalizer + line + row)
    of_student = tl.exp(q)
    along = tl.load(of_all + row)
    if has_entropy:
        along += tl.load(of_entropy + row) * (q + tl.load(entropy + row))
    gradient = -of_student * along
    # Few blocks of a row have a target, which is a test of one number.
    for number in range(0, count):
        chosen = tl.load(targets + row * count + number) - first
        if (chosen >= start) & (chosen < start + size):
            gradient += tl.where(columns == chosen, tl.load(of_logprobs + row * count + number), 0.0)
    if kind is not None:
        p, _ = _logits(
            teacher + row * teacher_stride,
            bits,
            columns,
            inside,
            teacher_factor,
            teacher_cap,
            teacher_is_capped,
            is_limited,
        )
        p = p - tl.load(teacher_normalizer + row) - tl.load(teacher_normalizer + line + row)
        _, slopes = _terms(p, q, beta, of_p, of_q, kind)
        gradient += tl.load(of_divergence + row) * (slopes - of_student * tl.load(slopes_of_row + row))
    tl.store(out + row * out_stride + columns, (gradient * slope * scale).to(out.dtype.element_ty), mask=inside)


OPERATORS = torch.library.Library("verl_mg", "FRAGMENT")
_ROWS = "Tensor products, Tensor? bits, float factor, float? cap"
_TEACHER = "Tensor{0} teacher, float teacher_factor, float? teacher_cap, Tensor{0} teacher_normalizer"
OPERATORS.define(f"row_sums({_ROWS}, Tensor targets, int first, str? kind, Tensor(a!) out) -> ()")
OPERATORS.define(
    f"row_divergence({_ROWS}, Tensor normalizer, {_TEACHER.format('')}, str kind, float beta, Tensor(a!) out) -> ()"
)
OPERATORS.define(
    f"row_gradient({_ROWS}, float scale, Tensor normalizer, Tensor targets, int first, Tensor of_logprobs, "
    f"Tensor of_all, Tensor entropy, Tensor? of_entropy, {_TEACHER.format('?')}, Tensor? of_divergence, "
    "Tensor? slopes, str? kind, float beta, Tensor(a!) out) -> ()"
)


def _row_sums(
    products: Tensor, bits: Tensor | None, factor: float, cap: float | None, targets: Tensor, first: int,
    kind: str | None, out: Tensor,
) -> None:  # fmt: skip
    count = targets.shape[1]
    _sums[(len(products),)](
        *_matrix(products), *_words(bits, products), targets, count, out, out.stride(0), products.shape[1], first,
        factor, cap or 0.0, kind, cap is not None, bits is not None, triton.next_power_of_2(count) if count else 0,
        _size(products), num_warps=WARPS,
    )  # fmt: skip


def _row_divergence(
    products: Tensor, bits: Tensor | None, factor: float, cap: float | None, normalizer: Tensor, teacher: Tensor,
    teacher_factor: float, teacher_cap: float | None, teacher_normalizer: Tensor, kind: str, beta: float, out: Tensor,
) -> None:  # fmt: skip
    _divergence[(len(products),)](
        *_matrix(products), *_words(bits, products), normalizer, *_matrix(teacher), teacher_normalizer, out,
        len(products), products.shape[1], factor, cap or 0.0, teacher_factor, teacher_cap or 0.0,
        beta, *log_shares(kind, beta), kind, cap is not None, teacher_cap is not None, bits is not None,
        _size(products), num_warps=WARPS,
    )  # fmt: skip


def _row_gradient(
    products: Tensor, bits: Tensor | None, factor: float, cap: float | None, scale: float, normalizer: Tensor,
    targets: Tensor, first: int, of_logprobs: Tensor, of_all: Tensor, entropy: Tensor, of_entropy: Tensor | None,
    teacher: Tensor | None, teacher_factor: float, teacher_cap: float | None, teacher_normalizer: Tensor | None,
    of_divergence: Tensor | None, slopes: Tensor | None, kind: str | None, beta: float, out: Tensor,
) -> None:  # fmt: skip
    size = _size(products)
    _gradient[(len(products), triton.cdiv(products.shape[1], size))](
        *_matrix(products), *_words(bits, products), normalizer, targets, targets.shape[1], of_logprobs, of_all,
        entropy, of_entropy, *((None, 0) if teacher is None else _matrix(teacher)), teacher_normalizer, of_divergence,
        slopes, out, out.stride(0), len(products), products.shape[1], first, factor, cap or 0.0, scale,
        teacher_factor, teacher_cap or 0.0, beta, *log_shares(kind, beta), of_entropy is not None, kind,
        cap is not None, teacher_cap is not None, bits is not None, size, num_warps=WARPS,
    )  # fmt: skip


for _name, _function in (
    ("row_sums", _row_sums),
    ("row_divergence", _row_divergence),
    ("row_gradient", _row_gradient),
):
    OPERATORS.impl(_name, _function, "CompositeExplicitAutograd")


def _matrix(matrix: Tensor) -> tuple[Tensor, int]:
    assert matrix.stride(1) == 1 or matrix.shape[1] <= 1
    return matrix, matrix.stride(0)


def _words(bits: Tensor | None, unused: Tensor) -> tuple[Tensor, int]:
    return (unused, 0) if bits is None else (bits, bits.stride(0))


def _size(products: Tensor) -> int:
    return min(BLOCK, max(16, triton.next_power_of_2(products.shape[1])))


class TritonRows(Rows):
    """Rows of products (n, v), which do not change."""

    copies = 1  # and the gradient in the backward pass
    copies_with_teacher = 2

    def __init__(self, products: Tensor, layer: OutputLayer, draw: Draw, tokens: slice, learns: bool = False) -> None:
        self._products, self._layer = products, layer
        self._factor, self._cap = layer.scale / draw.temperature, None
        if layer.softcap is not None:
            self._factor, self._cap = layer.scale / layer.softcap, layer.softcap / draw.temperature
        support = draw.support
        self._bits = None if support is None else support.bits(tokens, layer.first_token, layer.real_rows)

    @property
    def _arguments(self) -> tuple[Any, ...]:
        return self._products, self._bits, self._factor, self._cap

    def sums(self, targets: Tensor, extra: Extra, out: Tensor, reused: bool) -> None:
        """Fills `out` in one kernel."""
        torch.ops.verl_mg.row_sums(*self._arguments, targets.contiguous(), self._layer.first_token, extra, out)

    def normalize(self, normalizer: Tensor) -> None:
        """Does nothing: kernels normalize."""

    def divergence(self, teacher: Any, divergence: Divergence, normalizers: tuple[Tensor, Tensor]) -> Tensor:
        """Returns sums of terms and slopes."""
        ours, theirs = (each.contiguous() for each in normalizers)
        out = torch.empty_like(ours)
        options = divergence.kind, divergence.beta
        torch.ops.verl_mg.row_divergence(*self._arguments, ours, *teacher.as_teacher(theirs), *options, out)
        return out

    def as_teacher(self, normalizer: Tensor) -> tuple[Any, ...]:
        """Returns the arguments of a teacher's rows, whose candidates are the student's."""
        return self._products, self._factor, self._cap, normalizer

    def gradient(self, of: RowGradient, dtype: torch.dtype) -> Tensor:
        """Returns the gradient of the products."""
        out = aligned_empty(len(self._products), self._products.shape[1], dtype, self._products.device)
        of_teacher: tuple[Any, ...] = (None, 1.0, None, None, None, None, None, 0.5)
        if (teacher := of.teacher) is not None:
            theirs, kind = teacher.rows.as_teacher(teacher.normalizer), teacher.divergence.kind
            of_teacher = *theirs, teacher.of_divergence, teacher.slopes, kind, teacher.divergence.beta
        torch.ops.verl_mg.row_gradient(
            *self._arguments, self._layer.scale, of.normalizer, of.targets.contiguous(), self._layer.first_token,
            of.of_logprobs, of.of_logprobs.sum(1), of.entropy, of.of_entropy, *of_teacher, out,
        )  # fmt: skip
        return out
