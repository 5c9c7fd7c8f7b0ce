"""Messages and buckets: the same at both ends, of bounded size, in an order in which nobody waits in a circle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.random_models import config, plans
from verl_mg.layout import Layout, Placement
from verl_mg.reshard import Plan, Schedule, plan, schedule
from verl_mg.reshard.epochs import LAG, MAX_OPERATIONS
from verl_mg.sharding.weight_table import weight_table


def simulate(schedules: dict[int, Schedule]) -> list[str]:
    """Runs all ranks with two buckets in flight, whose messages progress on their own, as gloo's do.

    Returns what is left over if they come to a standstill.
    """
    started = dict.fromkeys(schedules, 0)
    landed = dict.fromkeys(schedules, 0)

    def ends(rank: int, bucket: int) -> set[tuple[object, ...]]:
        return {
            (
                *((rank, m.peer) if m.outgoing else (m.peer, rank)),
                tuple((p.tensor, p.box, p.forwarded) for p in m.segments),
            )
            for m in schedules[rank].buckets[bucket].messages
        }

    def may_start(rank: int) -> bool:
        buckets = schedules[rank].buckets
        if started[rank] == len(buckets) or started[rank] - landed[rank] == 2:
            return False
        following = buckets[started[rank]]
        oldest = buckets[landed[rank]].epoch
        return started[rank] == landed[rank] or not following.forwards or oldest > following.epoch - LAG

    posted: dict[int, set[tuple[object, ...]]] = {rank: set() for rank in schedules}
    moving = True
    while moving:
        moving = False
        for rank in schedules:
            if may_start(rank):
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


def schedules_of(moved: Plan, dtype: torch.dtype, bucket_bytes: int) -> dict[int, Schedule]:
    return {rank: schedule(moved, rank, dtype, bucket_bytes) for rank in range(8)}


@given(plans(), st.sampled_from([2000, 4000, 10**6]))
@settings(max_examples=25)
def test_schedule_has_no_deadlock_and_bounded_buckets(moved, bucket_bytes):
    schedules = schedules_of(moved, torch.bfloat16, bucket_bytes)
    assert simulate(schedules) == []
    for rank, own in schedules.items():
        assert own.bytes_received == moved.lower_bound(rank, 2)
        arrived: dict[tuple[str, object], int] = {}
        for bucket in own.buckets:
            assert bucket.nbytes <= bucket_bytes
            for message in bucket.messages:
                for part in message.segments:
                    if not message.outgoing:
                        arrived[part.tensor, part.box] = bucket.epoch
                    elif part.forwarded:
                        assert arrived[part.tensor, part.box] == bucket.epoch - LAG


@given(plans(), st.sampled_from([200, 4000, 10**6]))
@settings(max_examples=10)
def test_schedule_both_ends_have_a_message_in_the_same_epoch_and_one_each_way(moved, bucket_bytes):
    ends: dict[bool, dict[tuple[int, int, int], object]] = {True: {}, False: {}}
    for rank, own in schedules_of(moved, torch.float32, bucket_bytes).items():
        assert [bucket.epoch for bucket in own.buckets] == sorted({bucket.epoch for bucket in own.buckets})
        for bucket in own.buckets:
            for message in bucket.messages:
                pair = (rank, message.peer) if message.outgoing else (message.peer, rank)
                content = [(part.tensor, part.box, part.dtype, part.forwarded) for part in message.segments]
                assert (bucket.epoch, *pair) not in ends[message.outgoing]
                ends[message.outgoing][bucket.epoch, *pair] = content
    assert ends[True] == ends[False]


@given(plans(), st.sampled_from([400, 10**6]))
@settings(max_examples=8)
def test_plan_counts_of_peers_and_messages_equal_the_schedules(moved, bucket_bytes):
    peers, counted = moved.peers(), moved.epochs(2, bucket_bytes).messages()
    for rank, own in schedules_of(moved, torch.bfloat16, bucket_bytes).items():
        messages = [message for bucket in own.buckets for message in bucket.messages]
        assert peers[rank] == {message.peer for message in messages}
        if bucket_bytes == 10**6:
            assert counted.get(rank, 0) == len(messages)
        else:  # some boxes have fewer elements than their tensor has parts
            assert counted.get(rank, 0) >= len(messages)


@pytest.mark.parametrize(("bucket_bytes", "parts"), [(2**28, 1), (2**20, 4)])
def test_schedule_merges_small_tensors_and_sends_large_ones_alone(bucket_bytes, parts):
    weights = weight_table(config("llama", hidden_size=1024, intermediate_size=1024, num_hidden_layers=8))
    moved = plan(
        weights.shard_map_megatron(Placement(Layout(), (0,))), weights.shard_map_megatron(Placement(Layout(), (1,)))
    )
    messages = [m for bucket in schedule(moved, 1, torch.float32, bucket_bytes).buckets for m in bucket.messages]
    large = [message for message in messages if any(".mlp." in segment.tensor for segment in message.segments)]
    assert len(large) == 8 * 3 * parts
    assert all(len(message.segments) == 1 and message.nbytes == 2**22 // parts for message in large)
    assert len(messages) - len(large) < len(moved.rank_plan(1).receives) / 3


@pytest.mark.parametrize("bucket_bytes", [64, 256])
def test_schedule_cuts_tensors_larger_than_a_bucket(bucket_bytes):
    weights = weight_table(config("llama"))
    moved = plan(weights.shard_map_megatron(Placement(Layout(), (0,))), weights.shard_map_replicated((1,)))
    sizes = [bucket.nbytes for bucket in schedule(moved, 1, torch.float32, bucket_bytes).buckets]
    assert bucket_bytes // 2 < max(sizes) <= bucket_bytes and sum(sizes) == moved.lower_bound(1, 4)


def test_schedule_message_has_float32_first_and_no_gaps():
    weights = weight_table(config("deepseek_v3"))
    source = weights.shard_map_megatron(Placement(Layout(), (0,)))
    (bucket,) = schedule(plan(source, weights.shard_map_replicated((1,))), 1, torch.bfloat16).buckets
    (message,) = bucket.messages
    sizes = [segment.dtype.itemsize for segment in message.segments]
    assert sizes == sorted(sizes, reverse=True) and set(sizes) == {2, 4}
    assert message.nbytes == sum(segment.nbytes for segment in message.segments)


def test_schedule_epoch_has_limited_operations_where_a_rank_has_many_peers():
    weights = weight_table(config("llama", num_hidden_layers=2))
    source = weights.shard_map_megatron(Placement(Layout(), (0,)))
    stages = weights.shard_map_megatron(Placement(Layout(pp=2).fit(300), tuple(range(1, 301))))
    buckets = schedule(plan(source, stages), 0, torch.bfloat16).buckets
    assert [len(bucket.messages) for bucket in buckets] == [150, 150] and 150 < MAX_OPERATIONS < 300
