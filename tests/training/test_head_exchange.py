"""Heads exchanged for tokens, against indexing of the whole tensors."""

import pytest
import torch
import torch.distributed as dist

from verl_mg.training.packed_attention import to_heads, to_tokens

TOKENS, HEADS, WIDTH = 8, 12, 3


def exchange(kv_heads):
    """What is wrong on this rank: the places where heads, way back or gradient differ."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, HEADS, WIDTH), (TOKENS, kv_heads, WIDTH), (TOKENS, kv_heads, WIDTH))
    whole = [torch.randn(shape, generator=generator) for shape in shapes]
    size, rank = dist.get_world_size(), dist.get_rank()
    run = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size)
    query, key, value = (x[run].clone().requires_grad_() for x in whole)
    own = to_heads(query, key, value, dist.group.WORLD)
    wrong = [own[0].shape != (TOKENS, HEADS // size, WIDTH)]
    for local in range(HEADS // size):
        head = rank * HEADS // size + local
        wrong.append(not torch.equal(own[0][:, local], whole[0][:, head]))
        for found, full in zip(own[1:], whole[1:], strict=True):
            served = found[:, local // (HEADS // size // found.shape[1])]
            wrong.append(not torch.equal(served, full[:, head // (HEADS // kv_heads)]))
    wrong.append(not torch.equal(to_tokens(own[0], dist.group.WORLD), query))
    sum(part.sum() for part in own).backward()
    copies = own[1].shape[1] * size / kv_heads
    wrong += [not (query.grad == 1).all(), not (key.grad == copies).all(), not (value.grad == copies).all()]
    return wrong


@pytest.mark.parametrize(("size", "kv_heads"), [(1, 3), (2, 4), (2, 3), (4, 2), (4, 6), (4, 1)])
def test_head_exchange_pairs_query_heads_with_their_key_value_heads(ranks, size, kv_heads):
    assert not any(wrong for found in ranks.run(size, exchange, kv_heads) for wrong in found)


def shared_key():
    """As latent attention exchanges them: one key, narrower than the query, and values of as many heads as queries."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, HEADS, WIDTH), (TOKENS, 1, WIDTH - 1), (TOKENS, HEADS, WIDTH + 2))
    whole = [torch.randn(shape, generator=generator) for shape in shapes]
    size, rank = dist.get_world_size(), dist.get_rank()
    own = [x.chunk(size)[rank].clone().requires_grad_() for x in whole]
    query, key, value = to_heads(*own, dist.group.WORLD)
    wrong = [not torch.equal(found, x.chunk(size, dim=1)[rank]) for found, x in ((query, whole[0]), (value, whole[2]))]
    wrong.append(not torch.equal(key, whole[1]))
    key.sum().backward()
    return [*wrong, not (own[1].grad == size).all()]


@pytest.mark.parametrize("size", [2, 4])
def test_head_exchange_different_heads_and_widths_is_supported(ranks, size):
    assert not any(wrong for found in ranks.run(size, shared_key) for wrong in found)
