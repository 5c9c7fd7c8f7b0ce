"""Plans carried out between real ranks, against a gather of everything."""

import pytest
import torch
import torch.distributed as dist

from verl_mg.layout import Layout
from verl_mg.reshard import execute, plan
from verl_mg.weights import Shard, table
from verl_mg.weights.boxes import slices
from verl_mg.weights.model_config import parse_config

CONFIG = parse_config(
    {
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "hidden_size": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 12,
        "vocab_size": 37,
    }
)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(s.shape, generator=generator) for name, s in table(CONFIG).huggingface().items()}


def cut(shards: dict[str, Shard]) -> dict[str, torch.Tensor]:
    whole, parameters = tensors(), {}
    for name, shard in shards.items():
        parameters[name] = torch.zeros(shard.shape)
        for piece in shard.pieces:
            parameters[name][slices(piece.target)] = whole[piece.tensor][slices(piece.source)]
    return parameters


def reshard(source: str, target: str, bucket: int, dtype: torch.dtype) -> tuple[int, int]:
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    weights = table(CONFIG)
    have, want = Layout.parse(source).fit(len(ranks)), Layout.parse(target).fit(len(ranks))
    moves = plan({r: weights.megatron(have, r) for r in ranks}, {r: weights.megatron(want, r) for r in ranks})
    expected = cut(weights.megatron(want, rank))
    got = {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in expected.items()}
    traffic = execute(moves, rank, cut(weights.megatron(have, rank)), got, dtype, bucket)
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor.to(dtype)), name
    return traffic.bytes_received, moves.elements_received(rank) * dtype.itemsize


@pytest.mark.parametrize("source,target", [("tp4", "tp1"), ("pp4", "tp2"), ("tp2-pp2", "pp4"), ("tp1", "tp4")])
@pytest.mark.parametrize("bucket", [50, 10**6])
def test_weights_arrive_bit_for_bit_and_the_bytes_are_the_plan(ranks, source, target, bucket):
    for received, planned in ranks.run(4, reshard, source, target, bucket, torch.float32):
        assert received == planned
    if source == "tp1":
        assert received == 0


def test_values_are_cast_before_they_travel(ranks):
    full = ranks.run(4, reshard, "tp4", "pp2", 10**6, torch.float32)
    half = ranks.run(4, reshard, "tp4", "pp2", 10**6, torch.bfloat16)
    assert [2 * received for received, _ in half] == [received for received, _ in full]
