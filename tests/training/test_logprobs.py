"""Log-probs, entropies, divergences, likeliest tokens over a sharded vocabulary, against float64 over a whole one."""

import pytest
import torch
import torch.distributed as dist

from tests.training.logprob_cases import (
    KINDS,
    TOKENS,
    VOCAB,
    assert_equals_reference,
    assert_squares_equal_reference,
    assert_top_equals_reference,
    inputs,
)
from verl_mg.training.logprobs import vocab_parallel_logprobs
from verl_mg.training.output_layer import Draw, OutputLayer


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


def test_vocab_parallel_logprobs_of_bf16_weights_are_float32(ranks):
    hidden, weight, targets = (t.bfloat16() if t.is_floating_point() else t for t in inputs()[:3])
    (out,) = ranks.run(1, in_bfloat16, hidden, weight, targets)
    expected = (hidden @ weight.T).float().log_softmax(-1)[torch.arange(TOKENS), targets]
    assert out.dtype is torch.float32
    assert torch.allclose(out, expected, atol=1e-6)


def in_bfloat16(hidden, weight, targets):
    return vocab_parallel_logprobs(hidden, targets, OutputLayer(weight, 0, VOCAB, dist.group.WORLD), Draw(1.0))[0]


@pytest.mark.parametrize("is_limited", [False, True])
@pytest.mark.parametrize(("count", "rows"), [(1, 13), (4, 5)])
def test_vocab_parallel_squares_equal_sums_of_full_probabilities(ranks, count, rows, is_limited):
    assert_squares_equal_reference(ranks, count, rows, is_limited)


@pytest.mark.parametrize("is_limited", [False, True])
@pytest.mark.parametrize(("count", "rows"), [(1, 13), (2, 8), (4, 5)])
@pytest.mark.parametrize("k", [3, 13])
def test_vocab_parallel_top_equals_topk_of_full_logits(ranks, count, rows, k, is_limited):
    assert_top_equals_reference(ranks, count, rows, k, is_limited)
