"""Plans carried out between 8 real ranks, against the cut of the whole model, and against the lower bound."""

import math
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.random_models import assemble, checkpoint, config
from tests.helpers.tiny_models import daily_of
from tests.reshard.encoded_moves import room_for_encoded
from tests.reshard.moves import (
    CASES,
    DENSE,
    LATENT,
    MIXTURE,
    RANKS,
    Arriving,
    cast,
    hold,
    move_all,
    room_for,
    shard_map_of,
)
from verl_mg.errors import UserError
from verl_mg.layout import Layout, Placement
from verl_mg.models.tensor_index import TensorInfo
from verl_mg.reshard import encode, execute, plan, schedule
from verl_mg.reshard import encoding as encoding_module
from verl_mg.reshard.delta_transfer import SentValues, apply_patches, transfer_changes
from verl_mg.reshard.encode import Encoder, encoded_maps
from verl_mg.reshard.encoding import FP8, MXFP8, Encoding, Int4
from verl_mg.sharding.boxes import Piece, Shard, full_box
from verl_mg.sharding.shard_map import ExplicitShardMap
from verl_mg.sharding.weight_table import weight_table


@pytest.mark.parametrize("family", daily_of(CASES, "qwen3", "qwen2", "qwen3_moe", "deepseek_v3"))
@pytest.mark.parametrize("node,bucket_bytes", [pytest.param(8, 10**6, marks=pytest.mark.nightly), (2, 4000)])
def test_execute_weights_are_bitwise_equal_and_bytes_the_lower_bound(ranks, family, node, bucket_bytes):
    assert len(DENSE + MIXTURE + LATENT) >= 20
    assert ranks.run(RANKS, move_all, family, node, bucket_bytes) == [[]] * RANKS


def waits_before_each_bucket(family: str, case: int, bucket_bytes: int) -> tuple[list[int], int]:
    """The number of parameters that had been waited for when each bucket was sent; and how many this rank has."""
    c, sides = CASES[family]
    source, target = (shard_map_of(c, side) for side in sides[case])
    arriving, got = Arriving(hold(source, checkpoint(c, torch.float32))), room_for(target, torch.float32)
    own, seen = schedule(plan(source, target, 2), dist.get_rank(), torch.float32, bucket_bytes), []
    send = dist.batch_isend_irecv

    def counted(operations):
        seen.append(len(arriving.names))
        return send(operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", counted)
        execute(own, arriving.tensors, got, wait_for=arriving.wait_for)
    return seen, len(own.source_parameters)


def test_execute_first_buckets_are_sent_before_later_parameters_are_waited_for(ranks):
    for seen, parameters in ranks.run(RANKS, waits_before_each_bucket, "qwen3", 0, 2000):
        assert len(seen) > 3 and seen == sorted(seen)
        assert seen[0] < parameters / 2 and seen[-1] <= parameters


def test_execute_casts_before_sending_except_float32_router_bias(ranks):
    for full, half, same, exact in ranks.run(RANKS, cast):
        assert full == 2 * half and same and exact  # every rank has the biases: none travels


@pytest.mark.parametrize(
    ("side", "shape", "message"),
    [
        ("source", None, "source: the parameter 'output_layer.weight' of the plan is missing"),
        ("target", (3, 4), r"target: 'lm_head.weight' has shape \(3, 4\), but \(101, 8\) in the plan"),
    ],
)
def test_execute_wrong_tensors_are_named_and_nothing_is_written(side, shape, message):
    weights = weight_table(config("llama"))
    source, target = weights.shard_map_megatron(Placement.on(Layout(), 1)), weights.shard_map_replicated((0,))
    tensors = checkpoint(config("llama"), torch.float32)
    have = {name: assemble(shard, tensors) for name, shard in source.shards(0).items()}
    got = {name: torch.zeros(shard.shape) for name, shard in target.shards(0).items()}
    wrong, name = (have, "output_layer.weight") if side == "source" else (got, "lm_head.weight")
    if shape is None:
        del wrong[name]
    else:
        wrong[name] = torch.zeros(shape)
    with pytest.raises(UserError, match=message):
        execute(schedule(plan(source, target), 0, torch.float32), have, got)
    assert not any(tensor.any() for tensor in got.values())


class Allocations(TorchDispatchMode):
    """Counts the bytes of storages that are made inside, and the most that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs))
        given = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given | self._known:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def peaks(hidden: int, layers: int, bucket_bytes: int) -> list[tuple[int, int, int]]:
    """(most extra bytes, bytes of the model's share, bytes of the largest piece) for some pairs."""
    c = config("qwen3_moe", hidden_size=hidden, num_hidden_layers=layers)
    tensors, rank, found = checkpoint(c, torch.float32), dist.get_rank(), []
    for case in (MIXTURE[0], MIXTURE[1], MIXTURE[5]):
        source, target = (shard_map_of(c, side) for side in case)
        have, got = hold(source, tensors), room_for(target, torch.bfloat16)
        own = schedule(plan(source, target, 2), rank, torch.bfloat16, bucket_bytes)
        with Allocations() as allocations:
            execute(own, have, got)
        largest = max(2 * t.numel() for t in tensors.values())
        found.append((allocations.peak, sum(t.nbytes for t in got.values()), largest))
    return found


def test_execute_extra_memory_is_two_buckets_for_any_model(ranks):
    bucket = 12 * 1024
    for hidden, layers in ((64, 4), (256, 8)):
        for found in ranks.run(RANKS, peaks, hidden, layers, bucket):
            for peak, share, largest in found:
                assert 0 < peak <= 2 * bucket + largest
                if hidden == 256:
                    assert share > 5 * peak


def peak_of_changes(bucket_bytes: int) -> tuple[int, int, int]:
    """(Most extra bytes where all has changed, without what arrives; bytes sent; bytes of the largest box)."""
    c = config("qwen3", hidden_size=256, intermediate_size=256, num_hidden_layers=8)
    tensors = checkpoint(c, torch.bfloat16)
    source, target = (shard_map_of(c, side) for side in ("megatron tp4-pp2", "engine tp2"))
    have, sent = hold(source, tensors), SentValues()
    own = schedule(plan(source, target, 2), dist.get_rank(), torch.bfloat16, bucket_bytes)
    sent.keep_all(own, have)
    for tensor in have.values():
        tensor *= -1
    with Allocations() as allocations:
        held = transfer_changes(own, have, sent)
        arrived = allocations.now
    return allocations.peak - arrived, held[1].bytes_sent, max(t.nbytes for t in have.values())


def test_transfer_changes_extra_memory_is_two_buckets_and_a_slab(ranks):
    bucket = 32 * 1024
    for peak, nbytes, largest in ranks.run(RANKS, peak_of_changes, bucket):
        assert peak <= 2 * bucket + 3 * largest, "two buckets; factors, products and shifted products of a slab"
        assert nbytes > 4 * (2 * bucket + 3 * largest)


def peak_of_quantized(encoding: Encoding, bucket_bytes: int, slab: int) -> tuple[int, int, int]:
    """(Most extra bytes; bytes sent; bytes of the scales and of the magnitudes that they are computed from)."""
    c = config("qwen3", hidden_size=128, intermediate_size=128, num_hidden_layers=4, head_dim=32)
    plain, target = (shard_map_of(c, side) for side in ("megatron tp4-pp2", "engine tp2"))
    maps, have = encoded_maps(weight_table(c), plain, target, encoding), hold(plain, checkpoint(c, torch.bfloat16))
    own = schedule(plan(maps.source, maps.target, 2), dist.get_rank(), torch.bfloat16, bucket_bytes)
    encoder = Encoder(maps.source, maps.target.tensors, own, torch.bfloat16)
    got = room_for_encoded(maps.target, torch.bfloat16)
    with (
        patch.object(encode, "SLAB_ELEMENTS", slab),
        patch.object(encoding_module, "SLAB_ELEMENTS", slab),
        Allocations() as allocations,
    ):
        sources = encoder.run(have, lambda _: None)
        made = [v for name, v in sources.items() if name not in have and isinstance(v, torch.Tensor)]
        traffic = execute(own, sources, got)
    return allocations.peak, traffic.bytes_sent, sum((4 + v.itemsize) * v.numel() for v in made)


@pytest.mark.parametrize(
    "encoding",
    [pytest.param(FP8(rows=8, columns=8), marks=pytest.mark.nightly), MXFP8(), Int4(columns=32)],
    ids=lambda e: e.wire,
)
def test_execute_quantized_weights_extra_memory_is_two_buckets_and_a_slab(ranks, encoding):
    bucket, slab = 4 * 1024, 2**11
    for peak, nbytes, scales in ranks.run(RANKS, peak_of_quantized, encoding, bucket, slab):
        most = 2 * bucket + 4 * 4 * slab  # four numbers in float32 for each of the slab's elements, at most
        assert peak <= most + scales
        assert nbytes > most + scales


SHAPES = {"s": (), "m": (6, 4), "experts": (3, 4, 5)}


def turned_maps() -> tuple[ExplicitShardMap, ExplicitShardMap]:
    """Scalars, rows and experts on two ranks; on two others all of it, matrices transposed, one beside the other."""
    tensors = {name: TensorInfo(position, shape) for position, (name, shape) in enumerate(SHAPES.items())}
    source = {
        0: {"s": Shard((), (Piece("s", (), ()),)), "m": rows_of("m", 0, 2), "experts": rows_of("experts", 0, 1)},
        1: {"m": rows_of("m", 2, 6), "experts": rows_of("experts", 1, 3)},
    }
    box = full_box((3, 4, 5))
    target = {
        "scalar": Shard((), (Piece("s", (), ()),)),
        "turned": Shard((7, 4), (Piece("m", ((0, 6), (0, 4)), ((1, 7), (0, 4))),), (((0, 1), (0, 4)),), (1, 0)),
        "experts": Shard((3, 4, 5), (Piece("experts", box, box),), order=(2, 0, 1)),
    }
    return ExplicitShardMap(source, tensors), ExplicitShardMap({1: target, 2: target}, tensors)


def rows_of(name: str, start: int, stop: int) -> Shard:
    shape = (stop - start, *SHAPES[name][1:])
    return Shard(shape, (Piece(name, ((start, stop), *full_box(shape[1:])), full_box(shape)),))


def moved_and_turned() -> dict[str, torch.Tensor]:
    """What this rank has after the weights were moved; then one changes, and only changes are moved."""
    (source, target), rank = turned_maps(), dist.get_rank()
    moves = plan(source, target)
    messages, sent = schedule(moves, rank, torch.float32, 64), SentValues()
    tensors = {name: torch.arange(math.prod(shape)).view(shape) + 1.0 for name, shape in SHAPES.items()}
    have = {name: assemble(shard, tensors) for name, shard in source.shards(rank).items()}
    shards = target.shards(rank)
    got = {name: torch.zeros(shard.parameter_shape) for name, shard in shards.items()}
    views = {name: shard.described(got[name]) for name, shard in shards.items()}
    assert execute(messages, have, views).bytes_received == moves.lower_bound(rank, 4)
    sent.keep_all(messages, have)
    for values in have.values():
        values[values == 1] = -1  # the scalar, and the first element of the others
    patches, _ = transfer_changes(messages, have, sent)
    assert apply_patches(patches, views)
    return got


def test_execute_moves_scalars_and_transposed_parameters_and_their_changes(ranks):
    results = ranks.run(4, moved_and_turned)
    assert [len(got) for got in results] == [0, 3, 3, 0]
    expected = {name: torch.arange(math.prod(shape)).view(shape) + 1.0 for name, shape in SHAPES.items()}
    for values in expected.values():
        values[values == 1] = -1
    for got in results[1:3]:
        assert torch.equal(got["scalar"], expected["s"])
        assert torch.equal(got["turned"], torch.cat([torch.zeros(4, 1), expected["m"].T], dim=1))
        assert torch.equal(got["experts"], expected["experts"].permute(1, 2, 0))
