"""Calls of torch's kernels for packed sequences: signatures of the installed functions, and the results on the CPU.

FlexAttention computes on the CPU too, by matrices; the kernel that it generates on GPUs is not covered.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch._inductor.kernel.flex.flex_decoding import _use_flex_decoding
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch.nn import attention as torch_attention
from torch.nn.attention import bias, varlen
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import verl_mg.megatron  # noqa: F401
from tests.helpers.tiny_models import nightly
from tests.megatron.packed_inputs import WIDTH, described, outputs_and_gradients
from verl_mg.megatron import attention as megatron_attention
from verl_mg.megatron.attention import PackedAttention
from verl_mg.megatron.packed_sequences import describe_sequences
from verl_mg.training import flex_attention, packed_attention
from verl_mg.training.flex_attention import block_mask
from verl_mg.training.microbatch import zigzag_tokens
from verl_mg.training.packed_attention import Scores, _run_by_run, _with_ragged_kernel, attend_by_blocks

LENGTHS, HEADS = (5, 1, 7), 6
KEYS = (5, 4, 11)
"""Keys of sequences whose first tokens are computed with others."""
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
        ends = {"query": given["cu_seq_q"], "key": given["cu_seq_k"], "value": given["cu_seq_k"]}
        assert [int(given[f"cu_seq_{side}"].diff().max()) for side in "qk"] == [given["max_q"], given["max_k"]]
        sequences = zip(*(given[name].split(end.diff().tolist()) for name, end in ends.items()), strict=True)
        left, right = given["window_size"]
        assert right == 0
        return torch.cat([one(q, k, v, left, given) for q, k, v in sequences])

    def one(query: Tensor, key: Tensor, value: Tensor, left: int, given: dict[str, Any]) -> Tensor:
        behind = len(key) - len(query)  # the queries are those of the last tokens
        visible = torch.ones(len(query), len(key), dtype=torch.bool).tril(behind)
        visible = visible if left < 0 else visible.triu(behind - left)
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        context = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=given["scale"], enable_gqa=given.get("enable_gqa", False)
        )
        return context.transpose(0, 1)

    attend.__signature__ = signature  # type: ignore[attr-defined]
    return attend


def attention(window: int | None, softcap: float | None = None, sinks: bool = False) -> PackedAttention:
    config = TransformerConfig(num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, softmax_scale=0.3)
    module = PackedAttention(config, window=window, softcap=softcap, sinks=sinks)
    if module.softmax_offset is not None:
        module.softmax_offset.data = torch.linspace(-1.0, 2.0, HEADS)
    return module


@pytest.mark.parametrize("signature", [INSTALLED, without_gqa()], ids=["installed", "torch 2.11"])
@pytest.mark.parametrize("kv_heads", [2, 6])
@pytest.mark.parametrize("value_width", [8, 5])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("keys", [None, KEYS], ids=["whole", "shared"])
def test_ragged_kernel_gets_what_it_takes(monkeypatch, signature, kv_heads, value_width, window, keys):
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(varlen, "varlen_attn", kernel(signature, calls))
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, WIDTH), (kv_heads, WIDTH), (kv_heads, value_width))
    counts = (sum(LENGTHS), *2 * (sum(keys or LENGTHS),))
    drawn = (torch.randn(count, *shape, generator=generator) for count, shape in zip(counts, shapes, strict=True))
    query, key, value = drawn
    packed = described(LENGTHS, keys)
    scores = Scores(0.3, window)
    context = _with_ragged_kernel(query, key, value, packed, scores)
    expected = _run_by_run(query, key, value, packed, scores)
    assert context.shape == (sum(LENGTHS), HEADS, value_width)
    assert torch.allclose(context, expected, atol=1e-6)
    repeats = kv_heads < HEADS and "enable_gqa" not in signature.parameters
    assert calls[0]["key"].shape[1] == (HEADS if repeats else kv_heads)
    assert (calls[0]["value"] is value) == (value_width == WIDTH and not repeats)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_without_ragged_kernel_gives_torch_as_many_heads_of_keys_as_of_queries(monkeypatch, window):
    """Its kernel for float32 on GPUs has no grouped queries; without it torch keeps matrices of all pairs of tokens."""
    heads, attend = [], F.scaled_dot_product_attention

    def recorded(query, key, value, **options):
        heads.append((query.shape[1], key.shape[1], value.shape[1]))
        return attend(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    drawn = [torch.randn(sum(LENGTHS), n, WIDTH, device="meta") for n in (HEADS, 2, 2)]
    _run_by_run(*drawn, described(LENGTHS, None), Scores(window=window))
    assert heads == [(HEADS, HEADS, HEADS)] * len(LENGTHS)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("keys", [None, KEYS], ids=["whole", "shared"])
def test_attention_on_cpu_output_and_gradients_equal_softmax_of_masked_products(window, keys):
    draw = torch.Generator().manual_seed(0)
    counts = (sum(LENGTHS), *2 * (sum(keys or LENGTHS),))
    shapes = zip(counts, (HEADS, 2, 2), strict=True)
    drawn = [torch.randn(count, heads, WIDTH, generator=draw) for count, heads in shapes]
    packed, scores = described(LENGTHS, keys), Scores(0.3, window)

    def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        contexts = []
        for q, k, v in zip(query.split(LENGTHS), key.split(keys or LENGTHS), value.split(keys or LENGTHS), strict=True):
            distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
            hidden = (distance < 0) | (distance >= (window or len(k)))
            k, v = (x.double().repeat_interleave(HEADS // 2, 1) for x in (k, v))
            products = torch.einsum("qhd,khd->hqk", q.double(), k) * 0.3
            shares = products.masked_fill(hidden, -torch.inf).softmax(-1)
            contexts.append(torch.einsum("hqk,khd->qhd", shares, v).float())
        return torch.cat(contexts)

    functions = [lambda *heads: _run_by_run(*heads, packed, scores), masked]
    for found, expected in zip(*outputs_and_gradients(functions, drawn), strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [2, *nightly(6)])
@pytest.mark.parametrize(("window", "shares"), [(None, False), (40, False), (40, True)])
@pytest.mark.parametrize("feature", [{"softcap": 0.5}, {"sinks": True}], ids=["softcap", "sinks"])
def test_scores_by_block_mask_equal_matrix_products(ranks, kv_heads, window, shares, feature):
    # Gradients through torch's compiler start threads in a process, from which no ranks could be forked again.
    ((found, expected),) = ranks.run(1, attend_with_feature, kv_heads, window, shares, feature)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5) and b.abs().max() > 0.1


def attend_with_feature(kv_heads: int, window: int | None, shares: bool, feature: dict[str, Any]) -> list[list[Tensor]]:
    """Output and gradients by a block mask, and by matrix products."""
    packed = described((150, 1, 7, 100), (150, 141, 8, 190) if shares else None)
    packed.cp_group = dist.group.WORLD
    module = attention(window, **feature)
    options = {"sequences": packed, "scores": module._scores(packed.cp_group)}
    functions = [partial(attend, **options) for attend in (attend_by_blocks, _run_by_run)]
    keys = 489 if shares else 258
    return outputs_and_gradients(functions, drawn(258, kv_heads, keys), module)


@pytest.mark.parametrize("feature", [{}, {"softcap": 0.5}, {"sinks": True}], ids=["plain", "softcap", "sinks"])
@pytest.mark.parametrize("window", [None, 40])
def test_attention_to_gathered_keys_by_block_mask_equals_that_by_a_full_mask(ranks, feature, window):
    for found, expected in ranks.run(2, attend_to_gathered, feature, window):
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, atol=1e-5)


def attend_to_gathered(feature: dict[str, Any], window: int | None) -> list[list[Tensor]]:
    """Output and gradients of two chunks of each sequence, by a block mask and by one of all tokens."""
    packed = describe_sequences(torch.tensor([152, 4, 8, 600]), torch.ones(WIDTH // 2), 1.0)
    packed.cp_group, packed.zigzag = dist.group.WORLD, True
    module = attention(window, **feature)

    def by_blocks(*inputs: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(megatron_attention, "has_ragged_kernel", lambda *_: True)
            return module.local_context(*inputs, packed)

    functions = [by_blocks, partial(module.local_context, packed=packed)]
    return outputs_and_gradients(functions, drawn(382, 2, 382), module)


def drawn(tokens: int, kv_heads: int, keys: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, HEADS), (keys, kv_heads), (keys, kv_heads))
    return [torch.randn(*shape, WIDTH, generator=generator) for shape in shapes]


@pytest.mark.parametrize("chunks_of", [None, (2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("window", [None, 1, 140, 300])
@pytest.mark.parametrize("lengths", [(304, 8, 136, 8, 72, 256), (128, 384), (8,), (2048, 8)])
def test_block_mask_has_the_blocks_of_torch(lengths, window, chunks_of):
    total = sum(lengths)
    queries = zigzag_tokens(torch.tensor(lengths), *chunks_of) if chunks_of else torch.arange(total)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def visible(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = queries[query]
        return (sequence[place] == sequence[key]) & (place >= key) & (place - key < (window or total))

    expected = create_block_mask(visible, None, None, len(queries), total, device="cpu")
    found = block_mask(torch.tensor(lengths), window, torch.device("cpu"), queries if chunks_of else None)
    assert found.seq_lengths == expected.seq_lengths and found.BLOCK_SIZE == expected.BLOCK_SIZE
    blocks, needed = listed(found), listed(expected)
    assert blocks[1::2] == needed[1::2]
    for rows, least in zip(blocks[::2], needed[::2], strict=True):
        # A block of queries from both chunks reads also the keys between them.
        assert rows == least if chunks_of is None else all(map(set.issuperset, map(set, rows), map(set, least)))
    places = torch.arange(len(queries))[:, None], torch.arange(total)
    nothing = torch.zeros(())
    assert found.mask_mod(nothing, nothing, *places).equal(visible(nothing, nothing, *places))


def listed(mask: BlockMask) -> list[list[list[int]]]:
    """Blocks of each row or column in which a mask is partly and wholly true."""
    pairs = [
        (getattr(mask, f"{kind}_num_blocks"), getattr(mask, f"{kind}_indices"))
        for kind in ("kv", "full_kv", "q", "full_q")
    ]
    return [
        [row[:count].tolist() for row, count in zip(indices[0, 0], counts[0, 0].tolist(), strict=True)]
        for counts, indices in pairs
    ]


def test_causal_mask_of_the_flash_kernel_in_torch_is_that_of_the_last_tokens(monkeypatch):
    """torch computes its lower-right bias by the kernel with is_causal, where there are more keys than queries."""
    calls: list[dict[str, Any]] = []

    def attend(*_: Any, **options: Any) -> tuple[Tensor]:
        calls.append(options)
        return (torch.zeros(1, 2, 3, WIDTH),)

    monkeypatch.setattr(bias, "can_use_flash_attention", lambda *_: True)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", attend)
    query, key = torch.zeros(1, 2, 3, WIDTH), torch.zeros(1, 2, 5, WIDTH)
    torch.nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=bias.causal_lower_right(3, 5))
    assert [call["is_causal"] for call in calls] == [True]
    assert "for this particular op it means lower right" in inspect.getsource(bias.CausalBias._dispatch)


def node(*size: int) -> SimpleNamespace:
    """A tensor as torch's compiler sees it."""
    return SimpleNamespace(get_size=lambda: size)


@pytest.mark.parametrize("tokens", [7, 127, 300])
def test_flex_attention_of_few_tokens_is_not_compiled_as_decoding(monkeypatch, tokens):
    """torch's own choice: its kernel for decoding does not compile with blocks of 128 keys."""
    given: dict[str, Any] = {}

    def recorded(query: Tensor, *_: Any, **options: Any) -> Tensor:
        given.update(options)
        return query

    monkeypatch.setattr(flex_attention, "flex_attention", recorded)
    drawn = [torch.randn(tokens, n, WIDTH) for n in (4, 2, 2)]
    attend_by_blocks(*drawn, described((tokens,), None), Scores(softcap=0.5))
    tensors = node(1, 4, tokens, WIDTH), node(1, 1, 1, 1), node(1, 2, tokens, WIDTH)
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):
        assert not _use_flex_decoding(*tensors, given["kernel_options"], True)
        assert _use_flex_decoding(*tensors, {}, True) == (tokens < 128)


def test_installed_torch_has_flash_attention_3():
    assert packed_attention.IMPLEMENTATION in torch_attention.list_flash_attention_impls()
    register = torch_attention._registry._FLASH_ATTENTION_IMPLS[packed_attention.IMPLEMENTATION]
    assert inspect.signature(register).parameters["module_path"].default == packed_attention.PACKAGE
    assert list(inspect.signature(torch_attention.activate_flash_attention_impl).parameters) == ["impl"]
    assert torch_attention.current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("width", "value_width", "implementation", "expected"),
    [
        (128, 128, None, True),
        (192, 128, None, False),
        (192, 128, "FA3", True),
        (192, 64, "FA3", False),
        (256, 128, "FA3", False),
        (64, 48, "FA3", True),
    ],
)
def test_takes_value_width_is_that_of_the_active_kernel(monkeypatch, width, value_width, implementation, expected):
    monkeypatch.setattr(torch_attention, "current_flash_attention_impl", lambda: implementation)
    assert packed_attention.takes_value_width(width, value_width) is expected
