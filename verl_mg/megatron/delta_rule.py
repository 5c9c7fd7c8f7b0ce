"""Gated delta rule and short convolution over packed sequences (Gated DeltaNet, arXiv:2412.06464).

The state S of a head is a matrix, key times value, which decays by exp(g) and is corrected towards v by a share beta:

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - exp(g_t) S_(t-1)^T k_t)^T        o_t = S_t^T q_t / sqrt(key width)

On GPUs in half precision the kernels of flash-linear-attention compute this where they are installed, elsewhere torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_mg.device import copy_to
from verl_mg.library import is_installed
from verl_mg.training.microbatch import positions_of

CHUNK = 64  # tokens whose states are computed together, as in the kernels of flash-linear-attention
L2_EPS = 1e-6  # added to the squared length by which queries and keys are normalized, as in `transformers`


def has_fused_kernels(x: Tensor) -> bool:
    """Returns whether flash-linear-attention computes this tensor; its kernels are not deterministic."""
    # GPU: in 16 bits, kernels of flash-linear-attention where it is installed and the job is not deterministic.
    # GPU-TEST: none
    # GPU-RAN: not yet
    return (
        x.device.type == "cuda"
        and x.dtype in (torch.float16, torch.bfloat16)
        and not torch.are_deterministic_algorithms_enabled()
        and is_installed("fla")
    )


@dataclass(frozen=True)
class Chunks:
    """Chunks of packed sequences: first the first chunk of each sequence, then the second ones, and so on.

    Sequences are in the order of their number of chunks, the longest first: the sequences with a further chunk are the
    first ones of the step before, and their states a slice of its states. Lengths 100, 30 and 130 have counts 3 2 1:

        130: 0..63   100: 0..63   30: 0..29   |   130: 64..127   100: 64..99   |   130: 128..129
    """

    tokens: Tensor  # (chunks, CHUNK) int64, index of each token; the number of tokens for padding
    places: Tensor  # (tokens,) int64, place of each token in `tokens`
    counts: tuple[int, ...]  # number of sequences that have an n-th chunk, descending
    positions: Tensor  # (tokens, 1) int64, position of each token in its sequence

    @classmethod
    def of(cls, lengths: Tensor, device: torch.device) -> Chunks:
        """Cuts sequences of (n,) lengths on the CPU, at least 1 each, into chunks."""
        total = int(lengths.sum())
        number = -(-lengths // CHUNK)
        order = number.argsort(descending=True, stable=True)
        counts = tuple(int((number > step).sum()) for step in range(int(number.max())))
        starts = (lengths.cumsum(0) - lengths)[order]
        offsets = torch.arange(CHUNK)
        chunks = []
        for step, count in enumerate(counts):
            within = step * CHUNK + offsets
            index = starts[:count, None] + within
            chunks.append(index.masked_fill(within >= lengths[order[:count], None], total))
        tokens = torch.cat(chunks)
        # All padding writes to one entry, which is cut off below.
        places = torch.empty(total + 1, dtype=torch.int64).scatter_(0, tokens.flatten(), torch.arange(tokens.numel()))
        parts = tokens, places[:total], positions_of(lengths)[:, None]
        tokens, places, positions = (copy_to(device, each) for each in parts)
        return cls(tokens, places, counts, positions)

    def cut(self, x: Tensor) -> Tensor:
        """Returns the tokens of each chunk, 0 for padding: (tokens, heads, d) -> (chunks, heads, CHUNK, d)."""
        padded = F.pad(x, (0, 0, 0, 0, 0, 1))
        return padded.index_select(0, self.tokens.flatten()).unflatten(0, (-1, CHUNK)).transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """Returns the tokens in order, the inverse of `cut`."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


def convolve(x: Tensor, filters: Tensor, chunks: Chunks, ends: Tensor) -> Tensor:
    """Convolves each element of x (T, elements) over its last tokens, followed by SiLU; before a sequence it is 0."""
    if has_fused_kernels(x):
        from fla.modules.convolution import causal_conv1d

        return causal_conv1d(x=x[None], weight=filters, activation="silu", cu_seqlens=ends)[0].squeeze(0)
    # `filters` (elements, width) end with the factor of the token itself.
    wide, factors = x.float(), filters.float()
    total = wide * factors[:, -1]
    for before in range(1, filters.shape[1]):
        earlier = F.pad(wide, (0, 0, before, 0))[: len(x)]
        total = total + torch.where(chunks.positions >= before, earlier, 0.0) * factors[:, -1 - before]
    return F.silu(total).to(x.dtype)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks, ends: Tensor
) -> Tensor:
    """Computes the gated delta rule over packed sequences, with queries and keys normalized to length 1.

    Query and key (tokens, heads, d), value (tokens, heads, d_v) -> (tokens, heads, d_v) in the dtype of `value`; decay
    g, at most 0, and beta, from 0 to 1, are (tokens, heads) float32. `ends` are the (n + 1,) cumulative lengths.
    """
    if has_fused_kernels(value):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        inputs: dict[str, Any] = {"q": query, "k": key, "v": value, "g": decay, "beta": beta.to(value.dtype)}
        batch = {name: x[None].contiguous() for name, x in inputs.items()}
        output = chunk_gated_delta_rule(**batch, use_qk_l2norm_in_kernel=True, cu_seqlens=ends.long())[0]
        return output.squeeze(0)
    query, key = _normalized(query.float()) * query.shape[-1] ** -0.5, _normalized(key.float())
    numbers = [decay[..., None], beta[..., None]]
    q, k, v, g, b = (chunks.cut(x) for x in (query, key, value.float(), *numbers))
    return chunks.join(_by_chunk(q, k, v, g, b, chunks.counts)).to(value.dtype)


def _by_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Computes the rule chunk by chunk (arXiv:2412.06464, section 3.3): all parts without the state together.

    With the decays G from the start of a chunk, the corrections u of its tokens solve a triangular system of equations,

        u_i + beta_i sum_(j < i) exp(G_i - G_j) (k_i k_j) u_j = beta_i (v_i - exp(G_i) S^T k_i)

    where S is the state before the chunk. Shapes: (chunks, heads, CHUNK, d), g and beta (chunks, heads, CHUNK, 1).
    """
    total = g.cumsum(2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    # Masked before the exponential: from a later to an earlier token the difference is positive and could overflow.
    between = (total - total.mT).masked_fill(later, -torch.inf).exp()
    weighted = beta * k
    solved = torch.linalg.solve_triangular(
        weighted @ k.mT * between,
        torch.cat([beta * v, total.exp() * weighted], dim=-1),
        upper=False,
        unitriangular=True,
    )
    of_values, of_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores, from_state = q @ k.mT * between, total.exp() * q
    last = total[:, :, -1:]
    to_state, kept = ((last - total).exp() * k).mT, last.exp()

    state, outputs, start = k.new_zeros(counts[0], k.shape[1], k.shape[-1], v.shape[-1]), [], 0
    for count in counts:
        # Only the states of sequences with a further chunk are kept.
        here, state = slice(start, start + count), state[:count]
        correction = of_values[here] - of_state[here] @ state
        outputs.append(from_state[here] @ state + scores[here] @ correction)
        state = kept[here] * state + to_state[here] @ correction
        start += count
    return torch.cat(outputs)


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
