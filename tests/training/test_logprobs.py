"""Log-probs, entropies, divergences, likeliest tokens over a sharded vocabulary, against float64 over a whole one."""

import pytest
import torch
import torch.distributed as dist

from verl_mg.algorithms.divergence import Divergence
from verl_mg.training.logprobs import (
    OutputLayer,
    TeacherTokens,
    vocab_parallel_divergence,
    vocab_parallel_logprobs,
    vocab_parallel_top,
)

TOKENS, HIDDEN, VOCAB, TEMPERATURE = 11, 6, 13, 0.7
WIDTHS = (9, 5)
"""Of the hidden states of two teachers."""
KINDS = ["reverse", "forward", "js", "skew_forward", "skew_reverse"]
BETA = 0.3


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, HIDDEN, generator=generator) for n in (TOKENS, VOCAB))
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    pulls = torch.randn(3, TOKENS, generator=generator)
    theirs = torch.randn(TOKENS, max(WIDTHS), generator=generator)
    # The second teacher has more rows than the student, of padding.
    heads = [torch.randn(VOCAB + 3 * n, width, generator=generator) for n, width in enumerate(WIDTHS)]
    teachers = torch.arange(TOKENS) % 3 // 2
    return hidden, weight, targets, pulls, theirs, heads, teachers


def shard_of(weight, rows_per_rank):
    first = min(dist.get_rank() * rows_per_rank, VOCAB)
    real = min(rows_per_rank, VOCAB - first)
    shard = torch.full((rows_per_rank, weight.shape[1]), 7.0)  # padding that would show if it counted
    shard[:real] = weight[first : first + real]
    return shard, first, real


def compared(kinds, rows_per_rank, chunk_bytes, softcap, several=False):
    with pytest.MonkeyPatch.context() as patch:  # the ranks live on
        patch.setattr("verl_mg.training.logprobs.CHUNK_BYTES", {"cpu": chunk_bytes})
        return {kind: compared_by(kind, rows_per_rank, softcap, several) for kind in kinds}


def compared_by(kind, rows_per_rank, softcap, several):
    hidden, weight, targets, pulls, theirs, heads, teachers = inputs()
    shard, first, real = shard_of(weight, rows_per_rank)
    hidden.requires_grad_()
    shard.requires_grad_()
    group = dist.group.WORLD
    layer = OutputLayer(shard, first, real, group, softcap)
    if kind is None:
        out = torch.stack(vocab_parallel_logprobs(hidden, targets, layer, TEMPERATURE))
    else:
        layers = [OutputLayer(shard_of(head, rows_per_rank)[0], first, real, group, 2.5, scale=1.5) for head in heads]
        tokens = TeacherTokens(Divergence(kind=kind, beta=BETA), layers if several else layers[:1], theirs, teachers)
        out = torch.stack(vocab_parallel_divergence(hidden, targets, layer, TEMPERATURE, tokens))
    (out * pulls[: len(out)]).sum().backward()
    assert not shard.grad[real:].any()
    return out.detach(), hidden.grad, shard.grad[:real]


def reference(kind, softcap, several):
    """Outputs and gradients by autograd in float64."""
    hidden, weight, targets, pulls, theirs, heads, teachers = inputs()
    hidden, weight = (tensor.double().requires_grad_() for tensor in (hidden, weight))
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_q = (logits / TEMPERATURE).log_softmax(-1)
    each = [
        2.5 * torch.tanh(1.5 * theirs[:, : head.shape[1]].double() @ head[:VOCAB].double().T / 2.5) for head in heads
    ]
    of_teacher = torch.stack(each)[teachers if several else torch.zeros_like(teachers), torch.arange(TOKENS)]
    log_p = (of_teacher / TEMPERATURE).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()

    def kl(a, b):
        return (a * (a / b).log()).sum(-1)

    divergences = {
        "reverse": lambda: kl(q, p),
        "forward": lambda: kl(p, q),
        "js": lambda: BETA * kl(p, BETA * p + (1 - BETA) * q) + (1 - BETA) * kl(q, BETA * p + (1 - BETA) * q),
        "skew_forward": lambda: kl(p, BETA * p + (1 - BETA) * q),
        "skew_reverse": lambda: kl(q, (1 - BETA) * p + BETA * q),
    }
    outputs = [log_q[torch.arange(TOKENS), targets], -(q * log_q).sum(-1)]
    out = torch.stack(outputs if kind is None else [*outputs, divergences[kind]()])
    (out * pulls[: len(out)]).sum().backward()
    return out.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("count,rows", [(1, 13), (1, 16), (2, 8), (4, 5), (4, 13)])
@pytest.mark.parametrize(("chunk_bytes", "softcap"), [(1, None), (200, None), (2**20, None), (200, 1.5)])
def test_vocab_parallel_logprobs_values_and_gradients_equal_full_logits(ranks, count, rows, chunk_bytes, softcap):
    assert_equals_reference(ranks, count, [None], rows, chunk_bytes, softcap)


@pytest.mark.parametrize(("count", "rows"), [(1, 16), (2, 8), (4, 5)])
@pytest.mark.parametrize(
    ("chunk_bytes", "softcap", "several"), [(1, None, True), (3000, 1.5, True), (2**20, None, False)]
)
def test_vocab_parallel_divergence_equals_full_logits(ranks, count, rows, chunk_bytes, softcap, several):
    assert_equals_reference(ranks, count, KINDS, rows, chunk_bytes, softcap, several)


def assert_equals_reference(ranks, count, kinds, rows, chunk_bytes, softcap, several=False):
    results = ranks.run(count, compared, kinds, rows, chunk_bytes, softcap, several)
    for kind in kinds:
        expected, of_hidden, of_weight = reference(kind, softcap, several)
        assert expected[-1].min() > 0.05 and of_hidden.abs().min() > 1e-5 and of_weight.abs().min() > 0
        outs, hiddens, weights = zip(*(result[kind] for result in results), strict=True)
        for out in outs:
            assert torch.allclose(out.double(), expected, atol=1e-5), kind
        assert torch.allclose(sum(hiddens).double(), of_hidden, atol=1e-5), kind
        assert torch.allclose(torch.cat(weights).double(), of_weight, atol=1e-5), kind


def test_vocab_parallel_logprobs_of_bf16_weights_are_float32(ranks):
    hidden, weight, targets = (t.bfloat16() if t.is_floating_point() else t for t in inputs()[:3])
    (out,) = ranks.run(1, in_bfloat16, hidden, weight, targets)
    expected = (hidden @ weight.T).float().log_softmax(-1)[torch.arange(TOKENS), targets]
    assert out.dtype is torch.float32
    assert torch.allclose(out, expected, atol=1e-6)


def in_bfloat16(hidden, weight, targets):
    return vocab_parallel_logprobs(hidden, targets, OutputLayer(weight, 0, VOCAB, dist.group.WORLD), 1.0)[0]


def of_few(rows_per_rank, k):
    """The likeliest tokens, and log-probs of these as candidates with their gradients."""
    hidden, weight, *_ = inputs()
    shard, first, real = shard_of(weight, rows_per_rank)
    layer = OutputLayer(shard.requires_grad_(), first, real, dist.group.WORLD)
    with torch.no_grad():
        logprobs, tokens = vocab_parallel_top(hidden, layer, TEMPERATURE, k)
    hidden.requires_grad_()
    candidates, _ = vocab_parallel_logprobs(hidden, tokens, layer, TEMPERATURE)
    (candidates * torch.arange(1.0, k + 1)).sum().backward()
    return logprobs, tokens, candidates.detach(), hidden.grad


def squares_of(rows_per_rank):
    hidden, weight, *_ = inputs()
    shard, first, real = shard_of(weight, rows_per_rank)
    layer = OutputLayer(shard, first, real, dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl_mg.training.logprobs.CHUNK_BYTES", {"cpu": 12 * rows_per_rank})  # three tokens in a chunk
        return vocab_parallel_logprobs(hidden, inputs()[2], layer, TEMPERATURE, "squares")


@pytest.mark.parametrize(("count", "rows"), [(1, 13), (4, 5)])
def test_vocab_parallel_squares_equal_sums_of_full_probabilities(ranks, count, rows):
    hidden, weight, targets, *_ = inputs()
    whole = (hidden @ weight.T / TEMPERATURE).double().softmax(-1)
    expected = whole.gather(1, targets[:, None])[:, 0].log().float(), whole.square().sum(-1).float()
    for found in ranks.run(count, squares_of, rows):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("count", "rows"), [(1, 13), (2, 8), (4, 5)])
@pytest.mark.parametrize("k", [3, 13])
def test_vocab_parallel_top_equals_topk_of_full_logits(ranks, count, rows, k):
    hidden, weight, *_ = inputs()
    hidden.requires_grad_()
    whole = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)
    expected = whole.topk(k)
    (expected.values * torch.arange(1.0, k + 1)).sum().backward()
    results = ranks.run(count, of_few, rows, k)
    for logprobs, tokens, candidates, _ in results:
        assert torch.equal(tokens, expected.indices)
        assert torch.allclose(logprobs, expected.values, atol=1e-5)
        assert torch.allclose(candidates, expected.values, atol=1e-5)
    assert torch.allclose(sum(grad for *_, grad in results), hidden.grad, atol=1e-5)
    assert hidden.grad.abs().min() > 1e-5
