"""Kernels of rows of logits, interpreted on the CPU: against float64 over whole logits, and against torch's rows."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from tests.helpers.tiny_models import nightly
from tests.training.logprob_cases import (
    KINDS,
    assert_equals_reference,
    assert_squares_equal_reference,
    assert_top_equals_reference,
)
from verl_mg.algorithms.divergence import Divergence
from verl_mg.training import logprobs, output_layer
from verl_mg.training.logprobs import TeacherTokens, vocab_parallel_divergence, vocab_parallel_logprobs
from verl_mg.training.microbatch import Support
from verl_mg.training.output_layer import Draw, OutputLayer
from verl_mg.training.vocabulary_rows import TorchRows

HIDDEN, SEVERAL = 8, 5
WHOLE, BLOCKS = 2**20, 200
"""Bytes of a chunk: all logits, and a few tokens or a few rows of the vocabulary."""


@pytest.mark.parametrize(
    ("count", "rows", "chunk_bytes", "softcap"),
    [
        (1, 13, BLOCKS, None),
        (2, 8, WHOLE, 1.5),
        (4, 5, BLOCKS, 1.5),
        *nightly((1, 16, WHOLE, None), (1, 13, 1, None), (2, 8, BLOCKS, None), (4, 5, WHOLE, None), (4, 13, 1, 1.5)),
    ],
)
def test_kernels_of_logprobs_equal_full_logits(kernel_ranks, count, rows, chunk_bytes, softcap):
    assert_equals_reference(kernel_ranks, count, [None], rows, chunk_bytes, softcap)


@pytest.mark.parametrize(
    ("count", "rows", "kinds", "chunk_bytes", "softcap", "several"),
    [
        *((2, 8, [kind], WHOLE, None, False) for kind in KINDS),
        *nightly(*((n, 16 // n + 1, KINDS, size, 1.5, True) for n in (1, 2, 4) for size in (3000, WHOLE))),
    ],
)
def test_kernels_of_divergence_equal_full_logits(kernel_ranks, count, rows, kinds, chunk_bytes, softcap, several):
    assert_equals_reference(kernel_ranks, count, kinds, rows, chunk_bytes, softcap, several)


@pytest.mark.parametrize("is_limited", [False, True])
def test_kernels_of_squares_and_likeliest_tokens_equal_full_logits(kernel_ranks, is_limited):
    """The likeliest tokens of all are further targets of each token."""
    assert_squares_equal_reference(kernel_ranks, 4, 5, is_limited)
    assert_top_equals_reference(kernel_ranks, 2, 8, 3, is_limited)


def both(tokens, vocab, dtype, temperature, softcap, chunk_bytes, kind=None):
    """Outputs and gradients by kernels, and by operations of torch: of the same products, some targets twice."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, HIDDEN, generator=generator).to(dtype) for n in (tokens, vocab + 3))
    targets = torch.randint(vocab, (tokens, SEVERAL), generator=generator)
    targets[:, 1] = targets[:, 0]
    sizes = torch.randint(2, 9, (tokens,), generator=generator) * (torch.arange(tokens) % 2)
    ids = torch.cat([torch.randperm(vocab, generator=generator)[:size] for size in sizes] or [sizes]).int()
    support = Support.of(sizes.int(), ids, torch.arange(tokens), torch.device("cpu"))
    pulls = torch.randn(SEVERAL + 2, tokens, generator=generator)
    chosen, results = logprobs.rows_on, []
    for rows_on in (chosen, lambda _: TorchRows):
        given = [each.clone().requires_grad_() for each in (hidden, weight)]
        layer = OutputLayer(given[1], 0, vocab, dist.group.WORLD, softcap, scale=0.5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logprobs, "rows_on", rows_on)
            patch.setattr(output_layer, "CHUNK_BYTES", {"cpu": chunk_bytes})
            draw = Draw(temperature, support)
            if kind is None:
                found, entropy = vocab_parallel_logprobs(given[0], targets, layer, draw)
                outputs = torch.cat([found.T, entropy[None]])
            else:
                theirs = TeacherTokens(Divergence(kind=kind), [layer], hidden.flip(0), torch.zeros(tokens).long())
                outputs = torch.stack(vocab_parallel_divergence(given[0], targets[:, 0], layer, draw, theirs))
            # Tokens that were no candidates have log-probs near -1e9.
            outputs = torch.where(outputs > -1e6, outputs, 0.0)
            (outputs * pulls[: len(outputs)]).sum().backward()
        results.append((outputs.detach(), given[0].grad, given[1].grad))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "vocab", "temperature", "softcap", "chunk_bytes", "kind"),
    [
        (3, 5003, 1.0, None, WHOLE, None),  # more columns than a program has at the same time
        (5, 131, 0.7, 30.0, WHOLE, None),
        (5, 300, 1.3, 30.0, 4 * 5 * 129, "js"),
        (0, 131, 1.0, None, WHOLE, None),
    ],
)
def test_kernels_equal_operations_of_torch(kernel_ranks, dtype, tokens, vocab, temperature, softcap, chunk_bytes, kind):
    ((kernels, plain),) = kernel_ranks.run(1, both, tokens, vocab, dtype, temperature, softcap, chunk_bytes, kind)
    outputs, *gradients = kernels
    assert outputs.dtype is torch.float32 and all(each.dtype is dtype for each in gradients)
    assert_close(outputs, plain[0], rtol=3e-6, atol=3e-6)
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7  # of gradients that are rounded after sums in another order
    for found, expected in zip(gradients, plain[1:], strict=True):
        assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert not tokens or all(each.abs().max() > 0.01 for each in gradients)
    assert not gradients[1][vocab:].any()
