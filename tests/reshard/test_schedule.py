"""Messages and buckets: the same at both ends, of bounded size, in an order in which nobody waits in a circle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.random_models import config, configs, shard_map, sources
from verl_mg.layout import Layout, Placement
from verl_mg.reshard import Schedule, plan, schedule
from verl_mg.sharding.weight_table import weight_table


def simulate(schedules: dict[int, Schedule]) -> list[str]:
    """Runs all ranks with two buckets in flight; what is left over if they come to a standstill."""
    started = dict.fromkeys(schedules, 0)
    landed = dict.fromkeys(schedules, 0)

    def ends(rank: int, bucket: int) -> set[tuple[object, ...]]:
        return {
            (
                *((rank, m.peer) if m.outgoing else (m.peer, rank)),
                m.forwarded,
                tuple((p.tensor, p.box) for p in m.segments),
            )
            for m in schedules[rank].buckets[bucket].messages
        }

    posted: dict[int, set[tuple[object, ...]]] = {rank: set() for rank in schedules}
    moving = True
    while moving:
        moving = False
        for rank, own in schedules.items():
            following = started[rank] < len(own.buckets) and own.buckets[started[rank]].waits_for_previous
            if started[rank] < len(own.buckets) and started[rank] - landed[rank] < (1 if following else 2):
                posted[rank] |= ends(rank, started[rank])
                started[rank] += 1
                moving = True
            if landed[rank] < started[rank] and all(
                key in posted[key[1] if key[0] == rank else key[0]] for key in ends(rank, landed[rank])
            ):
                landed[rank] += 1
                moving = True
    return [f"{rank}: {landed[rank]} of {len(own.buckets)}" for rank, own in schedules.items()
            if landed[rank] < len(own.buckets)]  # fmt: skip


@given(st.data(), st.sampled_from([200, 2000, 10**6]), st.sampled_from([2, 4, 8]))
@settings(max_examples=40)
def test_schedule_has_no_deadlock_and_bounded_buckets(data, bucket_bytes, node):
    c = data.draw(configs())
    moved = plan(data.draw(sources(c)), data.draw(shard_map(c)), node)
    schedules = {rank: schedule(moved, rank, torch.bfloat16, bucket_bytes) for rank in range(8)}
    assert simulate(schedules) == []
    for rank, own in schedules.items():
        assert own.bytes_received == moved.lower_bound(rank, 2)
        for bucket in own.buckets:
            assert bucket.nbytes <= bucket_bytes
            # What is passed on has arrived in an earlier bucket.
            arriving = {(p.tensor, p.box) for m in bucket.messages if not m.outgoing for p in m.segments}
            leaving = {(p.tensor, p.box) for m in bucket.messages if m.outgoing and m.forwarded for p in m.segments}
            assert not arriving & leaving


@given(st.data(), st.sampled_from([200, 10**6]))
@settings(max_examples=20)
def test_schedule_messages_are_equal_at_both_ends(data, bucket_bytes):
    c = data.draw(configs())
    moved = plan(data.draw(sources(c)), data.draw(shard_map(c)), 4)
    streams: dict[tuple[int, int], dict[bool, list[object]]] = {}
    for rank in range(8):
        for bucket in schedule(moved, rank, torch.float32, bucket_bytes).buckets:
            for m in bucket.messages:
                pair = (rank, m.peer) if m.outgoing else (m.peer, rank)
                own = streams.setdefault(pair, {True: [], False: []})[m.outgoing]
                own.append((m.dtype, m.forwarded, [(p.tensor, p.box) for p in m.segments]))
    for pair, own in streams.items():
        assert own[True] == own[False], pair


def test_schedule_merges_small_tensors_and_sends_large_ones_alone():

    weights = weight_table(config("llama", hidden_size=1024, intermediate_size=1024, num_hidden_layers=8))
    moved = plan(
        weights.shard_map_megatron(Placement(Layout(), (0,))), weights.shard_map_megatron(Placement(Layout(), (1,)))
    )
    (bucket,) = schedule(moved, 1, torch.float32, 2**28).buckets
    sizes = [message.nbytes for message in bucket.messages]
    alone = [message for message in bucket.messages if message.nbytes >= 2**20]
    assert len(alone) == 8 * 3 and all(len(message.segments) == 1 for message in alone)
    assert len(sizes) - len(alone) < len(moved.rank_plan(1).receives) / 3


@pytest.mark.parametrize("bucket_bytes", [64, 256])
def test_schedule_cuts_boxes_larger_than_a_message(bucket_bytes):

    weights = weight_table(config("llama"))
    moved = plan(weights.shard_map_megatron(Placement(Layout(), (0,))), weights.shard_map_replicated((1,)))
    own = schedule(moved, 1, torch.float32, bucket_bytes)
    sizes = [m.nbytes for bucket in own.buckets for m in bucket.messages]
    assert max(sizes) <= bucket_bytes // 4 and sum(sizes) == moved.lower_bound(1, 4)
