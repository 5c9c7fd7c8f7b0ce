"""Chunks of a transfer, their sizes and their lower bound."""

import torch
import torch.distributed as dist

from verl_mg.engines.payloads import Staging
from verl_mg.models.tensor_index import TensorInfo
from verl_mg.sharding.boxes import Piece, Shard, full_box
from verl_mg.sharding.shard_map import ExplicitShardMap
from verl_mg.weight_sync.transfer_plan import (
    CHUNK_BYTES,
    KEPT_FREE_BYTES,
    MIN_CHUNK_BYTES,
    fitting_chunk_bytes,
    plan_transfer,
)


def rows(tensor, start, stop, columns=2):
    box = ((start, stop), (0, columns))
    return Shard((stop - start, columns), (Piece(tensor, box, full_box((stop - start, columns))),))


def chunks_of_example():
    """The example of `TransferPlan`: tensors, bytes that rank 0 sends and copies of rank 1, chunk by chunk."""
    tensors = {"t": TensorInfo(0, (4, 2)), "u": TensorInfo(1, (2, 2))}
    source = ExplicitShardMap({0: {"a": rows("t", 0, 2), "b": rows("u", 0, 2)}, 1: {"a": rows("t", 2, 4)}}, tensors)
    target = ExplicitShardMap({1: {"t": rows("t", 0, 4), "u": rows("u", 0, 2)}}, tensors)
    plan = plan_transfer(source, target, torch.bfloat16, max_bytes=16)
    sent = [sum(part.nbytes for part in chunk.schedule.segments(outgoing=True)) for chunk in plan.chunks]
    chunks = [(list(c.tensors), size, len(c.schedule.copies)) for c, size in zip(plan.chunks, sent, strict=True)]
    return chunks, dict(plan.lower_bounds), plan.staging_bytes if dist.get_rank() else 0


def test_transfer_plan_of_example_has_its_chunks_and_bytes(ranks):
    first, second = ranks.run(2, chunks_of_example)
    assert first == ([(["t"], 8, 0), (["u"], 8, 0)], {0: 0}, 0)
    assert second == ([(["t"], 0, 1), (["u"], 0, 0)], {1: 16}, 256 + 16)


def padding_alone():
    """What an engine's rank gets of a parameter without values, and in which chunks."""
    tensors = {"t": TensorInfo(0, (4, 2)), "u": TensorInfo(1, (2, 2))}
    weights = {"a": rows("t", 0, 4), "b": rows("u", 0, 2)}
    target = ExplicitShardMap({0: weights | {"bias": Shard((3, 2), (), (full_box((3, 2)),))}}, tensors)
    plan = plan_transfer(ExplicitShardMap({0: weights}, tensors), target, torch.bfloat16, max_bytes=16)
    staged = [Staging(chunk.shards, chunk.dtypes, torch.device("cpu")).tensors for chunk in plan.chunks]
    return [{name: tensor.abs().sum().item() for name, tensor in of.items() if name == "bias"} for of in staged]


def test_parameter_of_padding_alone_is_sent_as_zeros_once(ranks):
    assert ranks.run(1, padding_alone) == [[{"bias": 0.0}, {}]]


def test_fitting_chunk_bytes_halves_until_two_fit_free_memory():
    assert fitting_chunk_bytes([None, None]) == CHUNK_BYTES
    assert fitting_chunk_bytes([80 * 2**30, KEPT_FREE_BYTES + 2 * CHUNK_BYTES]) == CHUNK_BYTES
    assert fitting_chunk_bytes([80 * 2**30, KEPT_FREE_BYTES + 2 * CHUNK_BYTES - 1]) == CHUNK_BYTES // 2
    assert fitting_chunk_bytes([KEPT_FREE_BYTES + CHUNK_BYTES // 4, 80 * 2**30]) == CHUNK_BYTES // 8
    assert fitting_chunk_bytes([0]) == MIN_CHUNK_BYTES
