"""Log-probs, entropies, divergences and likeliest tokens of ranks, and the same in float64 over a whole vocabulary."""

import pytest
import torch
import torch.distributed as dist

from verl_mg.algorithms.divergence import Divergence
from verl_mg.training.logprobs import (
    TeacherTokens,
    vocab_parallel_divergence,
    vocab_parallel_logprobs,
    vocab_parallel_top,
)
from verl_mg.training.microbatch import Support
from verl_mg.training.output_layer import Draw, OutputLayer

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


def candidates():
    """Candidates of each token, its target among them; all of the vocabulary in two places, given as none."""
    generator, targets = torch.Generator().manual_seed(1), inputs()[2].tolist()
    sizes = [1, 0, 5, 12, 2, 3, 0, 13, 4, 1, 7]
    others = [[v for v in torch.randperm(VOCAB, generator=generator).tolist() if v != target] for target in targets]
    return [([target, *rest] * (size > 0))[:size] for target, rest, size in zip(targets, others, sizes, strict=True)]


def draw(is_limited):
    """The draw of the tokens, which are at the odd places of longer columns."""
    if not is_limited:
        return Draw(TEMPERATURE)
    lists = [ids for own in candidates() for ids in ([0, 1], own)]
    sizes = torch.tensor([len(ids) for ids in lists], dtype=torch.int32)
    flat = torch.tensor([token for ids in lists for token in ids], dtype=torch.int32)
    return Draw(TEMPERATURE, Support.of(sizes, flat, 2 * torch.arange(TOKENS) + 1, torch.device("cpu")))


def shard_of(weight, rows_per_rank):
    first = min(dist.get_rank() * rows_per_rank, VOCAB)
    real = min(rows_per_rank, VOCAB - first)
    shard = torch.full((rows_per_rank, weight.shape[1]), 7.0)  # padding that would show if it counted
    shard[:real] = weight[first : first + real]
    return shard, first, real


def compared(kinds, rows_per_rank, chunk_bytes, softcap, several=False):
    with pytest.MonkeyPatch.context() as patch:  # the ranks live on
        patch.setattr("verl_mg.training.output_layer.CHUNK_BYTES", {"cpu": chunk_bytes})
        cases = [(kind, is_limited) for kind in kinds for is_limited in (False, True)]
        return {
            (kind, limited): compared_by(kind, draw(limited), rows_per_rank, softcap, several)
            for kind, limited in cases
        }


def compared_by(kind, drawn, rows_per_rank, softcap, several):
    hidden, weight, targets, pulls, theirs, heads, teachers = inputs()
    shard, first, real = shard_of(weight, rows_per_rank)
    hidden.requires_grad_()
    shard.requires_grad_()
    group = dist.group.WORLD
    layer = OutputLayer(shard, first, real, group, softcap)
    if kind is None:
        out = torch.stack(vocab_parallel_logprobs(hidden, targets, layer, drawn))
    else:
        layers = [OutputLayer(shard_of(head, rows_per_rank)[0], first, real, group, 2.5, scale=1.5) for head in heads]
        tokens = TeacherTokens(Divergence(kind=kind, beta=BETA), layers if several else layers[:1], theirs, teachers)
        out = torch.stack(vocab_parallel_divergence(hidden, targets, layer, drawn, tokens))
    (out * pulls[: len(out)]).sum().backward()
    assert not shard.grad[real:].any()
    return out.detach(), hidden.grad, shard.grad[:real]


def reference(kind, is_limited, softcap, several):
    """Outputs and gradients by autograd in float64, each token over the list of its candidates."""
    hidden, weight, targets, pulls, theirs, heads, teachers = inputs()
    hidden, weight = (tensor.double().requires_grad_() for tensor in (hidden, weight))
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    each = [
        2.5 * torch.tanh(1.5 * theirs[:, : head.shape[1]].double() @ head[:VOCAB].double().T / 2.5) for head in heads
    ]
    of_teacher = torch.stack(each)[teachers if several else torch.zeros_like(teachers), torch.arange(TOKENS)]
    ids = [own or list(range(VOCAB)) for own in candidates()] if is_limited else [list(range(VOCAB))] * TOKENS
    lines = [
        outputs_of_token(logits[i, own] / TEMPERATURE, of_teacher[i, own] / TEMPERATURE, own.index(targets[i]), kind)
        for i, own in enumerate(ids)
    ]
    out = torch.stack(lines).T
    (out * pulls[: len(out)]).sum().backward()
    return out.detach(), hidden.grad, weight.grad


def outputs_of_token(logits, of_teacher, target, kind):
    """Log-prob of the target, entropy and divergence of one distribution."""
    p, q = of_teacher.softmax(-1), logits.softmax(-1)

    def kl(a, b):
        return (a * (a / b).log()).sum()

    divergences = {
        "reverse": lambda: kl(q, p),
        "forward": lambda: kl(p, q),
        "js": lambda: BETA * kl(p, BETA * p + (1 - BETA) * q) + (1 - BETA) * kl(q, BETA * p + (1 - BETA) * q),
        "skew_forward": lambda: kl(p, BETA * p + (1 - BETA) * q),
        "skew_reverse": lambda: kl(q, (1 - BETA) * p + BETA * q),
    }
    outputs = [q[target].log(), -(q * q.log()).sum()]
    return torch.stack(outputs if kind is None else [*outputs, divergences[kind]()])


def assert_equals_reference(ranks, count, kinds, rows, chunk_bytes, softcap, several=False):
    results = ranks.run(count, compared, kinds, rows, chunk_bytes, softcap, several)
    for case in results[0]:
        expected, of_hidden, of_weight = reference(*case, softcap, several)
        drawn = torch.tensor([len(own) != 1 for own in candidates()]) | (not case[1])  # one candidate: all is 0
        assert expected[-1, drawn].min() > 1e-3 and of_hidden[drawn].abs().min() > 1e-6
        assert of_weight.abs().min() > 0
        outs, hiddens, weights = zip(*(result[case] for result in results), strict=True)
        for out in outs:
            assert torch.allclose(out.double(), expected, atol=1e-5), case
        assert torch.allclose(sum(hiddens).double(), of_hidden, atol=1e-5), case
        assert torch.allclose(torch.cat(weights).double(), of_weight, atol=1e-5), case


def whole_logits(hidden, weight, is_limited):
    """Logits of all tokens, -inf for those that are no candidates."""
    own = candidates() if is_limited else [[]] * TOKENS
    allowed = torch.tensor([[not ids or token in ids for token in range(VOCAB)] for ids in own])
    return torch.where(allowed, hidden @ weight.T / TEMPERATURE, -torch.inf)


def of_few(rows_per_rank, k, is_limited):
    """The likeliest tokens, and log-probs of these as further targets with their gradients."""
    hidden, weight, *_ = inputs()
    shard, first, real = shard_of(weight, rows_per_rank)
    layer, drawn = OutputLayer(shard.requires_grad_(), first, real, dist.group.WORLD), draw(is_limited)
    with torch.no_grad():
        logprobs, tokens = vocab_parallel_top(hidden, layer, drawn, k)
    hidden.requires_grad_()
    scored, _ = vocab_parallel_logprobs(hidden, tokens, layer, drawn)
    torch.where(logprobs == -torch.inf, 0.0, scored * torch.arange(1.0, k + 1)).sum().backward()
    return logprobs, tokens, scored.detach(), hidden.grad


def squares_of(rows_per_rank, is_limited):
    hidden, weight, *_ = inputs()
    shard, first, real = shard_of(weight, rows_per_rank)
    layer = OutputLayer(shard, first, real, dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "verl_mg.training.output_layer.CHUNK_BYTES", {"cpu": 12 * rows_per_rank}
        )  # three tokens in a chunk
        return vocab_parallel_logprobs(hidden, inputs()[2], layer, draw(is_limited), "squares")


def assert_squares_equal_reference(ranks, count, rows, is_limited):
    hidden, weight, targets, *_ = inputs()
    whole = whole_logits(hidden, weight, is_limited).double().softmax(-1)
    expected = whole.gather(1, targets[:, None])[:, 0].log().float(), whole.square().sum(-1).float()
    for found in ranks.run(count, squares_of, rows, is_limited):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def assert_top_equals_reference(ranks, count, rows, k, is_limited):
    hidden, weight, *_ = inputs()
    hidden.requires_grad_()
    expected = whole_logits(hidden, weight, is_limited).log_softmax(-1).topk(k)
    exists = expected.values > -torch.inf
    (expected.values * torch.arange(1.0, k + 1))[exists].sum().backward()
    assert exists.all() != is_limited
    results = ranks.run(count, of_few, rows, k, is_limited)
    for logprobs, tokens, scored, _ in results:
        assert torch.equal(tokens, torch.where(exists, expected.indices, 0))
        assert torch.allclose(logprobs, expected.values, atol=1e-5)
        assert torch.allclose(scored[exists], expected.values[exists], atol=1e-5)
    assert torch.allclose(sum(grad for *_, grad in results), hidden.grad, atol=1e-5)
    assert (hidden.grad.abs().amin(1) > 1e-5).sum() >= (TOKENS - 2 if is_limited else TOKENS)
