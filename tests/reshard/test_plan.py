"""Plans against a plain simulation: who holds what, who gets what, and how little travels."""

from collections import Counter
from collections.abc import Collection

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.random_models import RANKS, checkpoint, config, configs, engines, layouts, shard_map, sources
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.models.tensor_index import TensorInfo
from verl_mg.reshard import best_stride, plan, schedule, split_into_chunks
from verl_mg.reshard.routing import assign_writes
from verl_mg.sharding.boxes import Piece, Shard, slices
from verl_mg.sharding.shard_map import ExplicitShardMap, ShardMap
from verl_mg.sharding.weight_table import weight_table


def elements_of(held: ShardMap, rank: int, tensors: dict[str, torch.Tensor]) -> set[int]:
    """Every element of the model that a rank holds."""
    return {
        number
        for shard in held.shards(rank).values()
        for piece in shard.pieces
        for number in tensors[piece.tensor][slices(piece.source)].flatten().tolist()
    }


@st.composite
def moves(draw: st.DrawFn) -> tuple[ShardMap, ShardMap, int, dict[str, torch.Tensor]]:
    """Source, target, node size and the numbered model; at times on disjoint ranks."""
    c = draw(configs())
    source, target = draw(sources(c)), draw(shard_map(c))
    if draw(st.booleans()):
        weights, apart = weight_table(c), tuple(range(RANKS, 2 * RANKS))
        to_engines = st.builds(lambda found: EnginePlacement(found.layout, apart, found.stride), engines(c))
        to_megatron = st.builds(lambda layout: Placement(layout, apart), layouts(c))
        target = draw(to_engines.map(weights.shard_map_engine) | to_megatron.map(weights.shard_map_megatron))
    return source, target, draw(st.sampled_from([2, 4, 8, 16])), checkpoint(c)


@given(moves())
@settings(max_examples=25)
def test_plan_writes_each_target_element_once_with_its_value(case):
    source, target, node, tensors = case
    moved = plan(source, target, node)
    plans = {rank: moved.rank_plan(rank) for rank in sorted({*source.ranks, *target.ranks})}
    sent = {
        (rank, send.peer, send.tensor, send.box, send.forwarded) for rank, part in plans.items() for send in part.sends
    }
    assert len(sent) == sum(len(part.sends) for part in plans.values())
    received = set()
    for rank, part in plans.items():
        written = {name: torch.zeros(shard.shape, dtype=torch.int64) for name, shard in target.shards(rank).items()}
        wanted = {name: torch.zeros_like(tensor) for name, tensor in written.items()}
        for name, shard in target.shards(rank).items():
            for piece in shard.pieces:
                space = wanted[name][slices(piece.target)]
                space += tensors[piece.tensor][slices(piece.source)].reshape(space.shape)
        for move in part.receives:
            space = written[move.parameter][slices(move.parameter_box)]
            space += tensors[move.tensor][slices(move.box)].reshape(space.shape)
            received.add((move.peer, rank, move.tensor, move.box, move.forwarded))
        own = {name: torch.zeros(shard.shape, dtype=torch.int64) for name, shard in source.shards(rank).items()}
        for name, shard in source.shards(rank).items():
            for piece in shard.pieces:
                space = own[name][slices(piece.target)]
                space += tensors[piece.tensor][slices(piece.source)].reshape(space.shape)
        for copy in sorted(part.copies, key=lambda copy: copy.from_target):
            here = (written if copy.from_target else own)[copy.source][slices(copy.source_box)]
            space = written[copy.target][slices(copy.target_box)]
            space += here.reshape(space.shape)
        for name in written:
            assert torch.equal(written[name], wanted[name]), name
    assert received == sent


@given(moves(), st.sampled_from([2, 4]))
@settings(max_examples=25)
def test_plan_lower_bound_and_traffic_are_the_missing_elements(case, itemsize):
    source, target, node, tensors = case
    moved = plan(source, target, node)
    traffic = moved.traffic(itemsize)
    float32 = {n for name, i in source.tensors.items() if i.dtype for n in tensors[name].flatten().tolist()}
    needed, held = ({rank: elements_of(side, rank, tensors) for rank in traffic} for side in (target, source))
    sent, entered = 0, 0
    for rank in traffic:
        missing = needed[rank] - held[rank]
        expected = sum(4 if element in float32 else itemsize for element in missing)
        assert moved.lower_bound(rank, itemsize) == expected
        assert traffic[rank].received == traffic[rank].lower_bound == expected
        sent += traffic[rank].sent
        entered += traffic[rank].entered
    assert sent == pytest.approx(sum(rank.received for rank in traffic.values()))
    # A byte enters a node once: the node lacks it, however many of its ranks want it.
    lacking_at = 0
    for place in {rank // node for rank in traffic}:
        inside = [rank for rank in traffic if rank // node == place]
        wanted = set().union(*(needed[rank] for rank in inside))
        there = set().union(*(held[rank] for rank in inside))
        lacking_at += sum(4 if element in float32 else itemsize for element in wanted - there)
    assert entered == pytest.approx(lacking_at)


def one_by_one(whole: ShardMap, tensors: Collection[str]) -> ExplicitShardMap:
    """The parameters with some of the tensors, in a map that knows of no tensors with equal boxes."""
    held = {
        rank: {name: s for name, s in whole.shards(rank).items() if s.pieces and s.pieces[0].tensor in tensors}
        for rank in whole.ranks
    }
    return ExplicitShardMap(held, {name: whole.tensors[name] for name in tensors})


@given(moves(), st.sampled_from([50, 4000]), st.sampled_from([200, 10**6]))
@settings(max_examples=10)
def test_schedule_of_a_chunk_is_that_of_a_plan_of_its_tensors_alone(case, elements, bucket_bytes):
    source, target, node, _ = case
    moved = plan(source, target, node)
    for chunk in split_into_chunks(target, target.ranks, elements):
        of_source = ExplicitShardMap({rank: source.shards(rank) for rank in source.ranks}, source.tensors)
        alone = plan(of_source, one_by_one(target, chunk.tensors), node)
        for rank in sorted({*source.ranks, *target.ranks})[::3]:
            part = schedule(moved, rank, torch.bfloat16, bucket_bytes, chunk.tensors)
            expected = schedule(alone, rank, torch.bfloat16, bucket_bytes)
            assert part.buckets == expected.buckets
            assert sorted(map(repr, part.copies)) == sorted(map(repr, expected.copies))
            assert (part.source_shapes, part.target_shapes) == (expected.source_shapes, expected.target_shapes)


@given(st.data())
@settings(max_examples=30)
def test_assign_writes_all_ranks_write_every_element_once(data):
    c = data.draw(configs())
    held, tensors = data.draw(sources(c)), checkpoint(c)
    written: Counter[int] = Counter()
    for rank in held.ranks:
        for duty in assign_writes(held, rank):
            written.update(tensors[duty.tensor][slices(duty.box)].flatten().tolist())
    assert written == Counter(range(1, 1 + sum(tensor.numel() for tensor in tensors.values())))


def test_assign_writes_balances_replicas():
    c = config("llama", num_hidden_layers=64)
    held = weight_table(c).shard_map_megatron(Placement.on(Layout(), RANKS))
    work = [sum((duty.box[0][1] - duty.box[0][0]) for duty in assign_writes(held, rank)) for rank in range(RANKS)]
    assert max(work) < 1.5 * min(work)


@pytest.mark.parametrize(
    ("train", "rollout", "stride", "fraction"),
    [
        # HybridFlow, table 2: (tp - tg pg) / (tg pg tp) of the model, with the best grouping.
        ("tp4-pp2", "tp4", 1, 1 / 8),
        ("tp8", "tp2", 4, 3 / 8),
        ("tp4", "tp4", 1, 0),
        ("tp8", "tp4", 2, 1 / 8),
    ],
)
def test_best_stride_moves_the_fraction_of_hybridflow_table_2(train, rollout, stride, fraction):
    c = config("llama", num_key_value_heads=8, vocab_size=512)
    weights = weight_table(c)
    source = weights.shard_map_megatron(Placement.on(Layout.parse(train), RANKS))
    engines_ = EnginePlacement(EngineLayout.parse(rollout), tuple(range(RANKS)))
    best = best_stride(source, weights, engines_, ranks_per_node=RANKS)
    assert best.stride == stride
    matrices = sum(t.numel() for t in checkpoint(c).values() if t.dim() > 1)
    norms = sum(t.numel() for t in checkpoint(c).values() if t.dim() == 1)
    for rank, traffic in plan(source, weights.shard_map_engine(best), RANKS).traffic(2).items():
        assert abs(traffic.received - 2 * fraction * matrices) <= 2 * norms, rank


def listed(shards: dict[str, Shard], shapes: dict[str, tuple[int, ...]]) -> ExplicitShardMap:
    return ExplicitShardMap({0: shards}, {name: TensorInfo(i, shape) for i, (name, shape) in enumerate(shapes.items())})


def run(tensor: str, start: int, stop: int, at: int = 0) -> Piece:
    return Piece(tensor, ((start, stop),), ((at, at + stop - start),))


WHOLE = {"q": Shard((3,), (run("t", 0, 3),))}


@pytest.mark.parametrize(
    ("source", "shapes", "message"),
    [
        ({"p": Shard((2,), (run("t", 0, 2),))}, {"t": (3,)}, r"t: the box \(\(2, 3\),\), which rank 0 needs"),
        ({"p": Shard((1,), (run("u", 0, 1),))}, {"u": (1,)}, r"t: the box \(\(0, 3\),\), which rank 0 needs for q"),
        (
            {"p": Shard((2,), (run("t", 0, 2),)), "r": Shard((2,), (run("t", 1, 3),))},
            {"t": (3,)},
            r"t: the box \(\(1, 2\),\) is in the source twice",
        ),
        (
            {"p": Shard((4,), (run("t", 0, 4),))},
            {"t": (4,)},
            r"t: the shape is \(4,\) in the source and \(3,\) in the target",
        ),
    ],
)
def test_plan_missing_or_duplicate_source_box_is_user_error(source, shapes, message):
    with pytest.raises(UserError, match=message):
        plan(listed(source, shapes), listed(WHOLE, {"t": (3,)}))


def test_plan_overlapping_or_outside_target_box_is_user_error():
    source = listed(WHOLE, {"t": (3,)})
    twice = listed({"q": Shard((2,), (run("t", 0, 2),)), "r": Shard((2,), (run("t", 1, 3),))}, {"t": (3,)})
    with pytest.raises(UserError, match="in the target twice"):
        plan(source, twice)
    beyond = listed({"q": Shard((4,), (run("t", 0, 4),))}, {"t": (3,)})
    with pytest.raises(UserError, match=r"the box \(\(0, 4\),\) of the target is outside the tensor's shape \(3,\)"):
        plan(source, beyond)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (Shard((3,), (run("t", 0, 2),)), r"q: 1 of 3 elements have no source tensor"),
        (Shard((3,), (run("t", 0, 2), run("t", 1, 3, at=1))), r"q: the box \(\(1, 2\),\) is written twice"),
        (
            Shard((3,), (Piece("t", ((0, 2),), ((0, 3),)),)),
            r"q: a box of shape \(2,\) of t is mapped to a box of shape \(3,\)",
        ),
        (Shard((2,), (run("t", 0, 3),)), r"q: the box \(\(0, 3\),\) is outside the shape \(2,\)"),
    ],
)
def test_explicit_shard_map_inconsistent_shard_is_user_error(shard, message):
    with pytest.raises(UserError, match=message):
        listed({"q": shard}, {"t": (3,)})


def test_plan_box_in_two_parameters_is_received_once():
    source = listed(WHOLE, {"t": (3,)})
    target = ExplicitShardMap({1: {"a": WHOLE["q"], "b": WHOLE["q"]}}, source.tensors)
    part = plan(source, target).rank_plan(1)
    assert [move.parameter for move in part.receives] == ["a"]
    assert [(copy.source, copy.target, copy.from_target) for copy in part.copies] == [("a", "b", True)]


def test_plan_keep_excludes_the_value_head():
    c = config("qwen3")
    actor = weight_table(c).shard_map_megatron(Placement.on(Layout(tp=2), 4))
    critic = weight_table(c, head="value").shard_map_megatron(Placement.on(Layout(pp=2), 4))
    with pytest.raises(UserError, match=r"score.weight: the box .* is missing in the source"):
        plan(actor, critic)
    moved = plan(actor, critic, keep=frozenset({"score.weight"}))
    assert "output_layer.weight" not in {move.parameter for move in moved.rank_plan(3).receives}
    assert schedule(moved, 3, torch.bfloat16).bytes_received == moved.lower_bound(3, 2) > 0
