"""Attention over packed sequences by torch's FlexAttention: one kernel that skips blocks which the mask excludes.

For what its variable-length kernel does not have: a softcap, attention sinks, and queries that are only some of a
sequence's tokens. FlexAttention (arXiv:2412.05496) generates its kernel when it is compiled, which happens only on
GPUs; not compiled, as in tests, it computes the same with matrices. Its block mask divides scores into blocks of 128
queries and 128 keys. It is computed in host memory from the lengths of the sequences, so that nothing of the size of
the scores exists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from verl_mg.device import copy_to

BLOCK = 128  # queries and keys of a block, torch's default

# With fewer than 128 queries torch would choose its kernel for decoding, which does not compile with our blocks. torch
# 2.11 has no option that names the other kernel, and later versions have this one too.
KERNEL_OPTIONS: Any = {"FORCE_USE_FLEX_ATTENTION": True}


def _attend_by_mask(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, **options: Any) -> Any:
    # The lengths that a mask comes with are constants of what is compiled, the sizes of tensors are variables.
    mask.seq_lengths = (query.shape[2], key.shape[2])
    return flex_attention(query, key, value, block_mask=mask, enable_gqa=True, kernel_options=KERNEL_OPTIONS, **options)


# GPU: FlexAttention is compiled into a kernel; the CPU computes it as written.
# GPU-TEST: tests/megatron/test_fake_cuda.py::test_train_family_on_cuda_has_values_of_transformers,
# tests/fsdp/test_training.py
# GPU-RAN: h200-1, h100-1
_compiled: Any = torch.compile(_attend_by_mask) if torch.cuda.is_available() else _attend_by_mask


def block_mask(
    lengths: Tensor,
    window: int | None,
    device: torch.device,
    queries: Tensor | None = None,
    selected: Tensor | None = None,
) -> BlockMask:
    """Returns the causal block mask of packed sequences: a token sees earlier ones of its sequence, and itself.

    `lengths` (n,) and `queries`, the ascending indices of the queries among all tokens (None: all), are on the CPU.
    `selected` (queries, bytes) uint8 is on the device: bit i is the i-th token of the query's sequence, see
    `sparse_attention`.
    """
    total = int(lengths.sum())
    tokens = torch.arange(total)
    first_seen = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    if window is not None:
        first_seen = torch.maximum(first_seen, tokens - window + 1)
    positions = tokens if queries is None else queries
    first_seen = first_seen[positions]
    first, last = _bounds(len(positions))
    first_key, last_key = _bounds(total)
    # No query sees an earlier key than its predecessor does: the first and the last of a block bound what it sees.
    # [queries, keys]: some pair of the block, and every pair
    seen = (first_key <= positions[last][:, None]) & (last_key >= first_seen[first][:, None])
    whole = (last_key <= positions[first][:, None]) & (first_key >= first_seen[last][:, None])
    whole &= (last - first == BLOCK - 1)[:, None]  # torch reads these without a mask
    # A block in which every pair is causal may still have keys that are not selected.
    if selected is not None:
        assert window is None
        _of_any_size(selected, 0, 1)
        whole = torch.zeros_like(whole)
    partly = seen & ~whole
    listed = [_listed(blocks) for blocks in (partly, whole, partly.T, whole.T)]
    (in_part, part), (in_whole, full), (of_part, q_part), (of_whole, q_full) = (
        [_of_any_size(copy_to(device, each), 2, 3) for each in pair] for pair in listed
    )
    bounds = _of_any_size(copy_to(device, torch.stack([first_seen, positions]).int()), 1)

    def visible(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= bounds[0, query]) & (key <= bounds[1, query])

    def visible_and_selected(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert selected is not None
        # The kernel evaluates the mask for all keys of a block, also of other sequences: the index must stay valid.
        place = (key - bounds[0, query]).clamp(0, 8 * selected.shape[1] - 1)
        return visible(_, __, query, key) & ((selected[query, place // 8] >> (place % 8)) & 1 > 0)

    return BlockMask(
        seq_lengths=(len(positions), total),
        kv_num_blocks=in_part,
        kv_indices=part,
        full_kv_num_blocks=in_whole,
        full_kv_indices=full,
        q_num_blocks=of_part,
        q_indices=q_part,
        full_q_num_blocks=of_whole,
        full_q_indices=q_full,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible if selected is None else visible_and_selected,
    )


def attend_with_block_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes attention under a block mask, with a softcap and with sinks if they are given.

    A sink is a further term of the softmax's denominator: with the log-sum-exp z of a token's scores and the sink s the
    result without it is multiplied by exp(z) / (exp(z) + exp(s)) = sigmoid(z - s).
    Shapes: query (queries, heads, d), key (T, kv_heads, d), value (T, kv_heads, d_v), result (queries, heads, d_v).
    """
    q, k, v = (_of_any_size(_of_any_size(x, 0).transpose(0, 1)[None], 2) for x in (query, key, value))
    score_mod = None if softcap is None else lambda score, *_: softcap * torch.tanh(score / softcap)
    options: dict[str, Any] = {"score_mod": score_mod, "scale": scale}
    # The log-sum-exp has gradients here; that of torch's variable-length kernel has none.
    if sinks is None:
        return _compiled(q, k, v, mask, **options)[0].transpose(0, 1)
    without, log_sum = _compiled(q, k, v, mask, return_lse=True, **options)
    share = torch.sigmoid(log_sum.float() - sinks.float()[:, None])
    return (without * share[..., None]).to(without.dtype)[0].transpose(0, 1)


def _of_any_size(tensor: Tensor, *dims: int) -> Tensor:
    """Has a compiled function take these dimensions for variables in its first call."""
    # torch would compile for the first size, and again when it sees a second one: of tokens, and of blocks.
    for dim in dims:
        if dim < tensor.dim():
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor


def _bounds(tokens: int) -> tuple[Tensor, Tensor]:
    first = torch.arange(0, tokens, BLOCK)
    return first, (first + BLOCK).clamp(max=tokens) - 1


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of true entries of each row of (n, n), and their columns, followed by the others'."""
    columns = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], columns.int()[None, None]
