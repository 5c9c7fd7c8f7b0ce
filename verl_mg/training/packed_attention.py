"""Causal attention within each of the packed sequences of a micro-batch: kernels of torch, and matrices on the CPU.

On GPUs in half precision torch's variable-length kernel, with a softcap or sinks a kernel of FlexAttention. Elsewhere
scaled-dot-product attention once for each run of sequences of one length, with a softcap or sinks matrix products.
FlashAttention-3 (arXiv:2407.08608) replaces torch's FlashAttention-2 on Hopper GPUs where its separate package is
installed; torch registers its kernels for the whole process. Neither has a softcap in torch, see `flex_attention`.

Shapes: query (T, heads, d), key (K, kv_heads, d), value (K, kv_heads, d_v) -> (T, heads, d_v), with all sequences one
after another and kv_heads a divisor of the heads.

Context-parallel ranks exchange tokens for heads before it, and heads for tokens after it (DeepSpeed Ulysses,
arXiv:2309.14509). Outside attention a rank has neighbouring tokens and all heads, inside it has all tokens and a part
of the heads:

    cp2, T = 8, heads a b c d        to_heads            to_tokens
    rank 0   tokens 0..3 of a b c d     ->  0..7 of a b     ->  0..3 of a b c d
    rank 1   tokens 4..7 of a b c d     ->  0..7 of c d     ->  4..7 of a b c d
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention
from torch.nn.attention.flex_attention import BlockMask

from verl_mg.choice import Choice
from verl_mg.errors import UserError, one_line
from verl_mg.library import is_installed
from verl_mg.training.flex_attention import attend_with_block_mask, block_mask

Run = tuple[int, int, int]
"""(number of sequences, queries of each, keys of each)"""
BY_BLOCKS = "torch's FlexAttention"
IN_HALF_PRECISION = "Write model.dtype=bfloat16 where float32 is not needed."


class Sequences:
    """Queries and keys of packed sequences, as attention reads them; descriptions of packed sequences inherit it.

    A sequence may have more keys than queries: its queries are then its last tokens.
    """

    lengths: Tensor  # (n,) int64 on the CPU, queries of each sequence
    key_lengths: Tensor  # (n,) int64 on the CPU, keys of each sequence
    cu_seqlens_q: Tensor  # (n + 1,) int32 on the device, where the queries of each sequence begin, and the end
    cu_seqlens_kv: Tensor  # (n + 1,) int32 on the device, where the keys of each sequence begin, and the end
    max_seqlen_q: int  # queries of the sequence with the most
    max_seqlen_kv: int  # keys of the sequence with the most

    @cached_property
    def runs(self) -> list[Run]:
        """Runs of neighbouring sequences with equally many queries and keys."""
        # Without a kernel for ragged sequences these are computed together, so that nothing is padded or copied.
        # Queries 4 4 2 with keys 4 4 4 are the runs (2, 4, 4), (1, 2, 4).
        sizes, counts = torch.stack([self.lengths, self.key_lengths]).unique_consecutive(return_counts=True, dim=1)
        return list(zip(counts.tolist(), *sizes.tolist(), strict=True))

    def block_mask(self, window: int | None) -> BlockMask:
        """Returns the block mask of the queries, see `flex_attention`; layers with the same window share it."""
        if window not in self._block_masks:
            self._block_masks[window] = block_mask(
                self.key_lengths, window, self.cu_seqlens_q.device, self.query_places()
            )
        return self._block_masks[window]

    def query_places(self) -> Tensor | None:
        """Returns the index of each query among the keys, ascending: int64 on the CPU; None where they are the same."""
        return None

    @cached_property
    def _block_masks(self) -> dict[int | None, BlockMask]:
        return {}


@dataclass(frozen=True)
class Scores:
    """Treatment of the scores of queries and keys."""

    scale: float | None = None  # factor of the scores; None for 1 / sqrt(d)
    window: int | None = None  # number of tokens that a token attends to at most, itself included; None for all
    softcap: float | None = None  # bound c of scores z, as c * tanh(z / c) (Gemma 2, arXiv:2408.00118); None for none
    sinks: Tensor | None = None
    """(heads,) further scores of each head's softmax, without values (gpt-oss, arXiv:2508.10925); None for none."""

    @property
    def are_plain(self) -> bool:
        """Whether every kernel of attention computes them."""
        return self.softcap is None and self.sinks is None

    @property
    def kind(self) -> str:
        """The keys that a query sees, and what changes their scores, in words."""
        extent = "full" if self.window is None else f"window of {self.window} tokens"
        return extent + ", softcapped" * (self.softcap is not None) + ", with sinks" * (self.sinks is not None)


def has_ragged_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether torch has a kernel for packed sequences of different lengths."""
    # GPU: in 16 bits, one call of FlashAttention for all packed rows; float32 and the CPU compute runs of rows.
    # GPU-TEST: tests/megatron/test_fake_cuda.py::test_train_family_on_cuda_has_values_of_transformers
    # GPU-RAN: h200-1, h100-1
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Kernel:
    """Implementation of `attend`, and its name."""

    compute: Callable[[Tensor, Tensor, Tensor, Sequences, Scores], Tensor]
    name: str

    def choice(self, part: str) -> Choice:
        """Returns the row of layers that it computes."""
        slow = f"not fused in float32. {IN_HALF_PRECISION}"
        return Choice(part, self.name, slow if self.compute is _run_by_run else "")


def kernel(device: torch.device, dtype: torch.dtype, scores: Scores) -> Kernel:
    """Returns the fastest kernel that can compute attention within packed sequences."""
    if not has_ragged_kernel(device, dtype):
        # GPU: FlashAttention in half precision, FlexAttention for scores with a softcap or sinks.
        # GPU-TEST: tests/run/test_start_table.py::test_megatron_model_on_cuda_says_what_its_layers_compute_with
        # GPU-RAN: h200-1, h100-1
        return Kernel(_run_by_run, f"torch's {'SDPA' if scores.are_plain else 'matrix products'}, run by run")
    if scores.are_plain:
        version = 3 if attention.current_flash_attention_impl() == IMPLEMENTATION else 2
        return Kernel(_with_ragged_kernel, f"torch's FlashAttention {version}")
    return Kernel(attend_by_blocks, BY_BLOCKS)


def attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scores: Scores) -> Tensor:
    """Computes causal attention within each packed sequence by the fastest kernel that can."""
    return kernel(query.device, query.dtype, scores).compute(query, key, value, sequences, scores)


def attend_by_blocks(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scores: Scores) -> Tensor:
    """Computes attention by FlexAttention, also for queries that are any tokens of their sequences."""
    mask = sequences.block_mask(scores.window)
    return attend_with_block_mask(query, key, value, mask, scores.scale, scores.softcap, scores.sinks)


def attend_where(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scores: Scores) -> Tensor:
    """Attends from the queries of sequences to their visible keys; `scores.window` is not read.

    Query (n, heads, L, d), key (n, kv_heads, K, d), value (n, kv_heads, K, d_v) and visible (L, K) bool, the same for
    all n sequences -> (n, heads, L, d_v).
    """
    key, value = _with_heads_of(query, key, value)
    if scores.are_plain:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scores.scale)
    products = query @ key.mT * (query.shape[3] ** -0.5 if scores.scale is None else scores.scale)
    if scores.softcap is not None:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    products = products.masked_fill(~visible, -torch.inf)
    # A sink is a further column of the softmax, which has no value and is cut off again.
    if scores.sinks is not None:
        additional = scores.sinks.to(products.dtype)[:, None, None].expand(*products.shape[:-1], 1)
        products = torch.cat([products, additional], dim=-1)
    shares = products.softmax(-1, dtype=torch.float32)[..., : visible.shape[1]]
    return shares.to(value.dtype) @ value


def _with_heads_of(query: Tensor, *others: Tensor) -> list[Tensor]:
    """Repeats the heads of keys and values, their dimension 1, until there are as many as of the query."""
    # The kernel for float32 on GPUs has no grouped queries: torch would multiply matrices of all pairs of tokens.
    repeats = [query.shape[1] // other.shape[1] for other in others]
    return [x if n == 1 else x.repeat_interleave(n, dim=1) for x, n in zip(others, repeats, strict=True)]


def _with_ragged_kernel(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scores: Scores) -> Tensor:
    """Computes `attend` by torch's variable-length kernel, for plain scores."""
    from torch.nn.attention.varlen import varlen_attn

    left_window = -1 if scores.window is None else scores.window - 1
    options: dict[str, Any] = {"scale": scores.scale, "window_size": (left_window, 0)}
    width = value.shape[2]
    if "enable_gqa" in signature(varlen_attn).parameters:
        options["enable_gqa"] = query.shape[1] > key.shape[1]
    else:  # torch 2.11, whose kernel has no grouped queries
        key, value = _with_heads_of(query, key, value)
    # Zeros beyond the width add nothing to the other elements of the result, and are cut off.
    if not takes_value_width(query.shape[2], width):
        value = F.pad(value, (0, query.shape[2] - width))
    ends, longest = (
        (sequences.cu_seqlens_q, sequences.cu_seqlens_kv),
        (sequences.max_seqlen_q, sequences.max_seqlen_kv),
    )
    # With fewer queries than keys the kernel takes the queries for the last tokens of their sequence.
    context = varlen_attn(query, key, value, *ends, *longest, **options)
    assert isinstance(context, Tensor)
    return context[..., :width]


def _run_by_run(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scores: Scores) -> Tensor:
    """Computes `attend` by matrices, over neighbouring sequences of one length together."""
    # GPU: its kernels for float32 are called through autograd.
    # GPU-TEST: tests/megatron/test_fake_cuda.py::test_two_steps_in_float32_on_cuda_equal_transformers
    # GPU-RAN: not yet
    if query.device.type == "cpu" and scores.are_plain and query.shape[2] == value.shape[2]:
        return _OnCpu.apply(query, key, value, sequences.runs, scores)
    outputs = []
    for run, q, k, v in zip(sequences.runs, *_by_run(sequences.runs, query, key, value), strict=True):
        visible = _visible(run, scores.window, query.device)
        if scores.are_plain and visible is None:
            k, v = _with_heads_of(q, k, v)
            context = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scores.scale)
        else:
            context = attend_where(q, k, v, _causal(run, query.device) if visible is None else visible, scores)
        outputs.append(context)
    return _in_order(outputs)


class _OnCpu(torch.autograd.Function):
    """Plain attention by torch's kernel for CPUs: all runs are one step of autograd, and heads are not repeated."""

    # Rows of a few hundred tokens take the kernel as long as autograd takes for the parts, copies and sums around it.

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, runs: Sequence[Run], scores: Scores) -> Tensor:
        outputs, normalizers = [], []
        for run, *heads in zip(runs, *_by_run(runs, query, key, value), strict=True):
            context, normalizer = _flash(*heads, **_options(run, scores, query))
            outputs.append(context)
            normalizers.append(normalizer)
        output = _in_order(outputs)
        ctx.save_for_backward(query, key, value, output, *normalizers)
        ctx.runs, ctx.scores = runs, scores
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, *normalizers = ctx.saved_tensors
        parts = _by_run(ctx.runs, query, key, value, output, grad)
        gradients = []
        for run, q, k, v, context, g, normalizer in zip(ctx.runs, *parts, normalizers, strict=True):
            options = _options(run, ctx.scores, query)
            gradients.append(_flash_backward(g, q, k, v, context, normalizer, **options))
        return *map(_in_order, zip(*gradients, strict=True)), None, None


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _options(run: Run, scores: Scores, query: Tensor) -> dict[str, Any]:
    visible = _visible(run, scores.window, query.device)
    if visible is None:
        return {"dropout_p": 0.0, "is_causal": True, "scale": scores.scale}
    mask = query.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf)
    return {"dropout_p": 0.0, "is_causal": False, "attn_mask": mask, "scale": scores.scale}


def _by_run(
    runs: Sequence[Run], query: Tensor, key: Tensor, value: Tensor, *of_queries: Tensor
) -> Iterator[list[Tensor]]:
    """Yields each argument divided into its parts (sequences, heads, tokens, d), one for each run."""
    for part, column in ((query, 1), (key, 2), (value, 2), *((part, 1) for part in of_queries)):
        parts = part.split([run[0] * run[column] for run in runs])
        yield [tokens.unflatten(0, (run[0], -1)).transpose(1, 2) for tokens, run in zip(parts, runs, strict=True)]


def _in_order(parts: Sequence[Tensor]) -> Tensor:
    """Joins parts (sequences, heads, tokens, d) of the runs to (T, heads, d)."""
    return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])


def _visible(run: Run, window: int | None, place: torch.device) -> Tensor | None:
    """Returns the keys that each query of a run sees, (queries, keys) bool; None: all up to its own."""
    _, length, keys = run
    if length == keys and (window is None or window >= keys):
        return None
    visible = _causal(run, place)
    return visible if window is None else visible.triu(keys - length + 1 - window)


def _causal(run: Run, place: torch.device) -> Tensor:
    _, length, keys = run
    return torch.ones(length, keys, dtype=torch.bool, device=place).tril(keys - length)


IMPLEMENTATION = "FA3"
PACKAGE = "flash_attn_interface"
HOPPER = (9, 0)


def use_fastest_kernels() -> None:
    """Activates FlashAttention-3 in this process where the GPU is a Hopper and the package is installed."""
    # GPU: on Hopper, FlashAttention-3 where `flash_attn_interface` is installed.
    # GPU-TEST: tests/megatron/test_fake_cuda.py::test_flash_attention_3_is_activated_once_where_it_can_run
    # GPU-RAN: not yet
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
        return
    # Some of its versions ignore that the backward pass is to be deterministic, others where heads have 256 elements.
    if torch.are_deterministic_algorithms_enabled():
        return
    known = IMPLEMENTATION in attention.list_flash_attention_impls()
    if known and attention.current_flash_attention_impl() is None and is_installed(PACKAGE):
        try:
            attention.activate_flash_attention_impl(IMPLEMENTATION)
        except (ImportError, OSError, RuntimeError) as error:
            raise UserError(
                f"{PACKAGE} is installed and torch cannot use it: {one_line(error)}. Install FlashAttention-3 for this "
                "torch, or remove the package."
            ) from error


def takes_value_width(width: int, value_width: int) -> bool:
    """Returns whether the kernel takes values of another width than queries and keys."""
    # FlashAttention-2 requires one width; FlashAttention-3 has kernels for the widths of DeepSeek's latent attention.
    if width == value_width:
        return True
    # The condition of its forward pass; its backward pass takes any widths up to its maximum.
    has_kernel = (128 < width <= 192 and 96 < value_width <= 128) or (width <= 64 and value_width <= 512)
    return has_kernel and attention.current_flash_attention_impl() == IMPLEMENTATION


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(values, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, values.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradients[0], ctx.group), None


def to_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchanges tokens for heads: from all heads of a token shard to a head shard of all tokens.

    From query (T / cp, heads, d), key and value (T / cp, kv_heads, d) to query (T, heads / cp, d), key and value
    (T, lcm(kv_heads, cp) / cp, d): key-value heads that cp does not divide are repeated until it does. Widths d may
    differ, and so may the heads of keys and values.
    """
    if group is None or group.size() == 1:
        return query, key, value
    size = group.size()
    # One message carries all three tensors, concatenated along their elements.
    by_rank = [_repeated(part, 1, size).unflatten(1, (size, -1)) for part in (query, key, value)]  # (T / cp, cp, n, d)
    exchanged: Tensor = _AllToAll.apply(torch.cat([part.flatten(2) for part in by_rank], dim=2).transpose(0, 1), group)
    local = exchanged.flatten(0, 1).split([part.shape[2] * part.shape[3] for part in by_rank], dim=1)
    query, key, value = (part.unflatten(1, like.shape[2:]) for part, like in zip(local, by_rank, strict=True))
    return query, key, value


def to_tokens(context: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Exchanges heads for tokens, the inverse of `to_heads`: (T, heads / cp, d) -> (T / cp, heads, d)."""
    if group is None or group.size() == 1:
        return context
    exchanged: Tensor = _AllToAll.apply(context.unflatten(0, (group.size(), -1)), group)
    return exchanged.transpose(0, 1).flatten(1, 2)


def heads_of_rank(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns this rank's part of a parameter (heads, ...), by the distribution of heads in `to_heads`."""
    if group is None or group.size() == 1:
        return x
    return _repeated(x, 0, group.size()).chunk(group.size())[group.rank()]


def _repeated(x: Tensor, dim: int, size: int) -> Tensor:
    return x.repeat_interleave(size // gcd(x.shape[dim], size), dim=dim)
