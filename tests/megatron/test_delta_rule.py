"""Gated delta rule and convolution over packed sequences against a loop over the tokens of each, in float64."""

import pytest
import torch

from verl_mg.megatron.delta_rule import CHUNK, Chunks, convolve, delta_rule

HEADS, KEY, VALUE = 3, 5, 4
LENGTHS = [1, CHUNK + 7, 12, 2 * CHUNK, CHUNK - 1]


def token_by_token(query, key, value, decay, beta):
    """The rule as its recurrence is written."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    state, outputs = query.new_zeros(HEADS, KEY, VALUE), []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = g.exp()[:, None, None] * state
        wrong = v - torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv->hkv", b[:, None] * k, wrong)
        outputs.append(torch.einsum("hkv,hk->hv", state, q) / KEY**0.5)
    return torch.stack(outputs)


@pytest.mark.parametrize("rate", [0.05, 2.0])  # states that last for many tokens, or for few
def test_delta_rule_of_packed_rows_equals_the_recurrence_of_each(rate):
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    shapes = ((HEADS, KEY), (HEADS, KEY), (HEADS, VALUE), (HEADS,), (HEADS,))
    inputs = [torch.randn(total, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    inputs[3], inputs[4] = -rate * inputs[3].abs(), inputs[4].sigmoid()
    weights = torch.randn(total, HEADS, VALUE, generator=generator, dtype=torch.float64)

    exact = [x.clone().requires_grad_() for x in inputs]
    rows = zip(*(x.split(LENGTHS) for x in exact), strict=True)
    expected = torch.cat([token_by_token(*row) for row in rows])
    (expected * weights).sum().backward()

    single = [x.float().requires_grad_() for x in inputs]
    chunks = Chunks.of(torch.tensor(LENGTHS), torch.device("cpu"))
    output = delta_rule(*single, chunks, torch.tensor([0, *LENGTHS]).cumsum(0).int())
    (output * weights.float()).sum().backward()
    assert (output - expected).abs().max() < 1e-5 * expected.abs().max()
    for ours, wanted in zip(single, exact, strict=True):
        assert wanted.grad.any() and (ours.grad - wanted.grad).abs().max() < 2e-5 * wanted.grad.abs().max()


def test_convolution_of_packed_rows_equals_that_of_each():
    generator = torch.Generator().manual_seed(0)
    x, filters = torch.randn(sum(LENGTHS), 6, generator=generator), torch.randn(6, 4, generator=generator)
    rows = [torch.nn.functional.pad(row.T, (3, 0)) for row in x.split(LENGTHS)]
    each = [torch.nn.functional.conv1d(row[None], filters[:, None], groups=6)[0].T for row in rows]
    chunks = Chunks.of(torch.tensor(LENGTHS), torch.device("cpu"))
    convolved = convolve(x, filters, chunks, torch.tensor([0, *LENGTHS]).cumsum(0).int())
    assert torch.allclose(convolved, torch.nn.functional.silu(torch.cat(each)), atol=1e-6)
