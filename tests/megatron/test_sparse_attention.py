"""Selection of keys against a search among all scores, and attention to them by a block mask and by a full one."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import verl_mg.megatron  # noqa: F401
from tests.helpers.random_models import config
from tests.megatron.packed_inputs import WIDTH, described, outputs_and_gradients
from verl_mg.config import MegatronConfig
from verl_mg.errors import UserError
from verl_mg.layout import Layout
from verl_mg.megatron import sparse_attention
from verl_mg.megatron.sparse_attention import attend_to_selected, selected_bits
from verl_mg.megatron.transformer_config import transformer_config
from verl_mg.training.model_spec import ModelSpec

TOP_K, HEADS = 5, 3
LENGTHS, KEYS = (19, 5, 9, 3), (19, 12, 9, 6)
"""Queries of sequences, and keys where the first tokens of some are computed with others."""


def drawn(queries: int, keys: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and weights of heads of few small integers, so that many scores are equal."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((queries, HEADS, WIDTH), (keys, WIDTH), (queries, HEADS))
    query, key, weights = (torch.randint(-1, 2, shape, generator=generator).float() for shape in shapes)
    return query, key, weights


def searched(query: Tensor, key: Tensor, weights: Tensor, keys: tuple[int, ...]) -> list[list[int]]:
    """Positions of the chosen keys of each query, by sorting."""
    chosen, sequences = [], zip(query.split(LENGTHS), key.split(keys), weights.split(LENGTHS), strict=True)
    for queries, own, factors in sequences:
        for number, (heads, factor) in enumerate(zip(queries, factors, strict=True)):
            seen = own[: len(own) - len(queries) + number + 1]
            scores = sum(w * torch.relu(seen @ head) for w, head in zip(factor, heads, strict=True))
            chosen.append(sorted(sorted(range(len(seen)), key=lambda s: (-scores[s], s))[:TOP_K]))
    return chosen


@pytest.mark.parametrize("scores_at_a_time", [2**27, 100])
@pytest.mark.parametrize("keys", [None, KEYS])
@pytest.mark.parametrize(("first", "last"), [(0, 36), (7, 30), (20, 22)])
def test_selected_bits_are_the_first_keys_with_the_highest_scores(monkeypatch, first, last, keys, scores_at_a_time):
    monkeypatch.setattr(sparse_attention, "SCORES", scores_at_a_time)
    packed, lengths = described(LENGTHS, keys), keys or LENGTHS
    query, key, weights = drawn(sum(LENGTHS), sum(lengths))
    bits = selected_bits(query[first:last], key, weights[first:last], packed, TOP_K, first)
    assert bits.shape == (last - first, 3)
    positions = [
        count for own, whole in zip(LENGTHS, lengths, strict=True) for count in range(whole - own + 1, whole + 1)
    ]
    found = [
        [s for s in range(positions[first + row]) if int(own[s // 8]) >> s % 8 & 1] for row, own in enumerate(bits)
    ]
    assert found == searched(query, key, weights, lengths)[first:last]


def test_exchange_of_keys_is_refused():
    fields = MegatronConfig(transformer={"cp_comm_type": "all_gather"})
    with pytest.raises(UserError, match=r"cp_comm_type=all_gather: sparse attention, .* exchanges heads. Leave it out"):
        transformer_config(config("deepseek_v32"), Layout(cp=2), ModelSpec(Path(), torch.float32, megatron=fields))


@pytest.mark.parametrize("shares", [False, True])
def test_attention_to_selected_keys_by_block_mask_equals_that_by_a_full_mask(ranks, shares):
    # Gradients through torch's compiler start threads in a process, from which no ranks could be forked again.
    ((found, expected, dense),) = ranks.run(1, attend, shares)
    for a, b, c in zip(found, expected, dense, strict=True):
        assert torch.allclose(a, b, atol=1e-5) and b.abs().max() > 0.1 and (b - c).abs().max() > 0.1


def attend(shares: bool) -> list[list[Tensor]]:
    """Output and gradients by a block mask, by a full one, and of attention to all keys."""
    lengths, keys = (150, 1, 7, 100), (150, 141, 8, 190) if shares else None
    packed, total = described(lengths, keys), sum(keys or lengths)
    bits, everything = selected_bits(*drawn(sum(lengths), total), packed, TOP_K, 0), torch.tensor([[255]])
    every = everything.to(torch.uint8).expand(len(bits), bits.shape[1])

    def attention(*inputs: Tensor, on_gpus: bool, selected: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparse_attention, "has_ragged_kernel", lambda *_: on_gpus)
            return attend_to_selected(*inputs, packed, selected, 0.3)

    kinds = ((True, bits), (False, bits), (False, every))
    functions = [partial(attention, on_gpus=on_gpus, selected=selected) for on_gpus, selected in kinds]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, HEADS, WIDTH, generator=generator) for n in (sum(lengths), total, total)]
    return outputs_and_gradients(functions, inputs)
