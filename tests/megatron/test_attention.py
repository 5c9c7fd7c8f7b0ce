"""The call of torch's variable-length kernel, against the installed function's signature and scaled dot products."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn.attention import varlen

import verl_mg.megatron  # noqa: F401
from verl_mg.megatron.attention import PackedAttention, describe_sequences

LENGTHS, HEADS, WIDTH = (5, 1, 7), 6, 8
INSTALLED = inspect.signature(varlen.varlen_attn)


def without_gqa() -> inspect.Signature:
    """The signature of torch 2.11."""
    kept = [parameter for name, parameter in INSTALLED.parameters.items() if name != "enable_gqa"]
    return INSTALLED.replace(parameters=kept)


def kernel(signature: inspect.Signature, calls: list[dict[str, Any]]) -> Callable[..., Tensor]:
    """A function with the signature that computes each sequence by scaled dot products."""

    def attend(*arguments: Any, **options: Any) -> Tensor:
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        calls.append(given := bound.arguments)
        sequences = zip(*(given[name].split(LENGTHS) for name in ("query", "key", "value")), strict=True)
        left, right = given["window_size"]
        assert right == 0
        return torch.cat([one(q, k, v, left, given) for q, k, v in sequences])

    def one(query: Tensor, key: Tensor, value: Tensor, left: int, given: dict[str, Any]) -> Tensor:
        visible = torch.ones(len(query), len(query), dtype=torch.bool).tril()
        visible = visible if left < 0 else visible.triu(-left)
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        context = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=given["scale"], enable_gqa=given.get("enable_gqa", False)
        )
        return context.transpose(0, 1)

    attend.__signature__ = signature  # type: ignore[attr-defined]
    return attend


def attention(window: int | None) -> PackedAttention:
    config = TransformerConfig(num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, softmax_scale=0.3)
    return PackedAttention(config, window=window)


@pytest.mark.parametrize("signature", [INSTALLED, without_gqa()], ids=["installed", "torch 2.11"])
@pytest.mark.parametrize("kv_heads", [2, 6])
@pytest.mark.parametrize("value_width", [8, 5])
@pytest.mark.parametrize("window", [None, 3])
def test_ragged_kernel_gets_what_it_takes(
    monkeypatch: pytest.MonkeyPatch,
    signature: inspect.Signature,
    kv_heads: int,
    value_width: int,
    window: int | None,
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(varlen, "varlen_attn", kernel(signature, calls))
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, WIDTH), (kv_heads, WIDTH), (kv_heads, value_width))
    query, key, value = (torch.randn(sum(LENGTHS), *shape, generator=generator) for shape in shapes)
    packed = describe_sequences(torch.tensor(LENGTHS), torch.ones(WIDTH // 2), 1.0)
    module = attention(window)
    context = module._with_ragged_kernel(query, key, value, packed)
    expected = module._length_by_length(query, key, value, packed)
    assert context.shape == (sum(LENGTHS), HEADS, value_width)
    assert torch.allclose(context, expected, atol=1e-6)
    repeats = kv_heads < HEADS and "enable_gqa" not in signature.parameters
    assert calls[0]["key"].shape[1] == (HEADS if repeats else kv_heads)
    assert (calls[0]["value"] is value) == (value_width == WIDTH and not repeats)
