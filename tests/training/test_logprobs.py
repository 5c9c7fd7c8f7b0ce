"""Vocabulary-parallel log-probs and entropy against autograd over the whole vocabulary."""

import pytest
import torch
import torch.distributed as dist

from verl_mg.training.logprobs import OutputLayer, vocab_parallel_logprobs

TOKENS, HIDDEN, VOCAB = 11, 6, 13


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, HIDDEN, generator=generator) for n in (TOKENS, VOCAB))
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    pulls = torch.randn(2, TOKENS, generator=generator)
    return hidden, weight, targets, pulls


def sharded(rows_per_rank, chunk_bytes, softcap):
    with pytest.MonkeyPatch.context() as patch:  # the ranks live on
        patch.setattr("verl_mg.training.logprobs.CHUNK_BYTES", {"cpu": chunk_bytes})
        return scored(rows_per_rank, softcap)


def scored(rows_per_rank, softcap):
    rank = dist.get_rank()
    hidden, weight, targets, pulls = inputs()
    first = min(rank * rows_per_rank, VOCAB)
    real = min(rows_per_rank, VOCAB - first)
    shard = torch.full((rows_per_rank, HIDDEN), 7.0)  # padding that would show if it counted
    shard[:real] = weight[first : first + real]
    hidden.requires_grad_()
    shard.requires_grad_()
    layer = OutputLayer(shard, first, real, dist.group.WORLD, softcap)
    out = vocab_parallel_logprobs(hidden, targets, layer, 0.7)
    (torch.stack(out) * pulls).sum().backward()
    return torch.stack(out).detach(), hidden.grad, shard.grad, real


@pytest.mark.parametrize("count,rows", [(1, 13), (1, 16), (2, 8), (4, 5), (4, 13)])
@pytest.mark.parametrize(("chunk_bytes", "softcap"), [(1, None), (200, None), (2**20, None), (200, 1.5)])
def test_vocab_parallel_logprobs_values_and_gradients_equal_autograd(ranks, count, rows, chunk_bytes, softcap):
    results = ranks.run(count, sharded, rows, chunk_bytes, softcap)
    hidden, weight, targets, pulls = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = hidden @ weight.T if softcap is None else softcap * torch.tanh(hidden @ weight.T / softcap)
    log_p = (logits / 0.7).log_softmax(-1)
    expected = torch.stack([log_p[torch.arange(TOKENS), targets], -(log_p.exp() * log_p).sum(-1)])
    (expected * pulls).sum().backward()
    for out, *_ in results:
        assert torch.allclose(out, expected, atol=1e-5)
    assert torch.allclose(sum(grad for _, grad, _, _ in results), hidden.grad, atol=1e-5)
    of_shards = torch.cat([grad[:real] for _, _, grad, real in results])
    assert torch.allclose(of_shards, weight.grad, atol=1e-5)
    assert weight.grad.abs().min() > 0
    assert all(not grad[real:].any() for _, _, grad, real in results)


def test_vocab_parallel_logprobs_of_bf16_weights_are_float32(ranks):
    hidden, weight, targets, _ = (t.bfloat16() if t.is_floating_point() else t for t in inputs())
    (out,) = ranks.run(1, _in_bf16, hidden, weight, targets)
    expected = (hidden @ weight.T).float().log_softmax(-1)[torch.arange(TOKENS), targets]
    assert out.dtype is torch.float32
    assert torch.allclose(out, expected, atol=1e-6)


def _in_bf16(hidden, weight, targets):
    return vocab_parallel_logprobs(hidden, targets, OutputLayer(weight, 0, VOCAB, dist.group.WORLD), 1.0)[0]
