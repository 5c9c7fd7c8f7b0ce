"""Plans against a plain simulation: who holds what, who gets what, and how little travels."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mg.layout import Layout
from verl_mg.reshard import Holdings, owners, plan
from verl_mg.weights import Piece, Shard, table
from verl_mg.weights.boxes import slices
from verl_mg.weights.model_config import parse_config

CONFIG = parse_config(
    {
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "hidden_size": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 2,
        "intermediate_size": 12,
        "vocab_size": 37,
    }
)
LAYOUTS = ["tp1", "tp2", "tp4", "pp2", "tp2-pp2", "pp4"]


def megatron(layout: str, ranks: int = 4) -> Holdings:
    fitted = Layout.parse(layout).fit(ranks)
    return {rank: table(CONFIG).megatron(fitted, rank) for rank in range(ranks)}


def huggingface(ranks: int = 4) -> Holdings:
    return {rank: table(CONFIG).huggingface() for rank in range(ranks)}


def elements_of(shards: dict[str, Shard]) -> set[tuple[str, int]]:
    """Every element of the model that a rank holds, as (tensor, flat index)."""
    held = set()
    shapes = {name: shard.shape for name, shard in table(CONFIG).huggingface().items()}
    for shard in shards.values():
        for piece in shard.pieces:
            shape = shapes[piece.tensor]
            numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)[slices(piece.source)]
            held |= {(piece.tensor, int(i)) for i in numbers.flatten()}
    return held


@given(st.sampled_from(LAYOUTS), st.sampled_from([*LAYOUTS, "whole"]))
@settings(max_examples=20)
def test_each_target_element_is_written_once_and_only_what_is_lacking_travels(source, target):
    have, want = megatron(source), huggingface() if target == "whole" else megatron(target)
    moves = plan(have, want)
    for rank, shards in want.items():
        for parameter, shard in shards.items():
            writes = torch.zeros(shard.shape, dtype=torch.int64)
            for move in moves.moves:
                if (move.target_rank, move.target) == (rank, parameter):
                    writes[slices(move.target_box)] += 1
            for box in shard.padding:
                writes[slices(box)] += 1
            assert (writes == 1).all(), parameter
        lacking = elements_of(shards) - elements_of(have[rank])
        assert moves.elements_received(rank) == len(lacking)


def test_the_load_of_senders_is_even():
    moves = plan(megatron("tp1"), {4: table(CONFIG).huggingface()}).moves
    sent: Counter[int] = Counter()
    for move in moves:
        sent[move.source_rank] += move.elements
    assert set(sent) == {0, 1, 2, 3}
    assert max(sent.values()) - min(sent.values()) <= max(move.elements for move in moves)


def test_owners_write_every_element_once():
    for layout in LAYOUTS:
        written: Counter[tuple[str, int]] = Counter()
        whole = table(CONFIG).huggingface()
        for duties in owners(megatron(layout)).values():
            for tensor, box, *_ in duties:
                shape = whole[tensor].shape
                numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)[slices(box)]
                written.update((tensor, int(i)) for i in numbers.flatten())
        assert set(written) == elements_of(whole) and set(written.values()) == {1}


def test_what_no_source_holds_is_named():
    part = {0: {"p": Shard((2,), (Piece("t", ((0, 2),), ((0, 2),)),))}}
    whole = {0: {"q": Shard((3,), (Piece("t", ((0, 3),), ((0, 3),)),))}}
    with pytest.raises(ValueError, match=r"t: 1 elements of the box \(\(0, 3\),\) that rank 0 needs for q"):
        plan(part, whole)
