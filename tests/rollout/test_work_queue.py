"""Work queue over shared counters: every sample once, in any order of the engines, and groups to one engine first."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from tests.helpers.counted_store import CountedStore
from verl_mg.rollout.work_queue import DynamicWorkQueue, Group, StaticWorkQueue, first_complete_groups

GROUPS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)).filter(any), min_size=1, max_size=9)


def make_groups(sizes: list[tuple[int, int]]) -> list[Group]:
    groups, start = [], 0
    for fresh, partial in sizes:
        groups.append(Group(tuple(range(start, start + fresh)), tuple(range(start + fresh, start + fresh + partial))))
        start += fresh + partial
    return groups


@given(GROUPS, st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_dynamic_queue_concurrent_engines_start_each_fresh_sample_once(sizes, engines, slots, draw):
    groups, store = make_groups(sizes), HashStore()
    queues = [DynamicWorkQueue(store, "call", groups, len(groups)) for _ in range(engines)]
    popped: list[int] = []
    idle: set[int] = set()
    while len(idle) < engines:
        engine = draw.randrange(engines)
        samples = queues[engine].pop(slots)
        assert len(samples) <= slots
        popped += samples
        idle = idle if samples else idle | {engine}
    assert sorted(popped) == sorted(i for group in groups for i in group.fresh)


@given(GROUPS, st.integers(1, 4))
def test_static_queue_shares_cover_all_fresh_samples_once(sizes, engines):
    groups, store = make_groups(sizes), HashStore()
    queues = [StaticWorkQueue(store, "call", groups, len(groups), engine, engines) for engine in range(engines)]
    popped = [i for queue in queues for i in (*queue.pop(2), *queue.pop(100))]
    assert popped == [i for group in groups for i in group.fresh]


def test_dynamic_queue_prompt_stays_on_one_engine_until_all_groups_are_claimed():
    groups, store = make_groups([(8, 0)] * 6), HashStore()
    queues = [DynamicWorkQueue(store, "call", groups, 6) for _ in range(2)]
    engines_of: dict[int, set[int]] = {g: set() for g in range(6)}
    for _ in range(24):
        for engine, queue in enumerate(queues):
            for sample in queue.pop(1):
                engines_of[sample // 8].add(engine)
    assert all(len(engines) == 1 for engines in engines_of.values())
    # All engines pop from a single group.
    both = [DynamicWorkQueue(store, "other", groups[:1], 1) for _ in range(2)]
    assert [len(queue.pop(4)) for queue in both] == [4, 4]


@given(GROUPS, st.integers(1, 3), st.data(), st.randoms(use_true_random=False))
def test_work_queue_is_done_when_enough_groups_are_complete(sizes, engines, data, draw):
    groups, store = make_groups(sizes), HashStore()
    needed = data.draw(st.integers(1, len(groups)))
    queues = [DynamicWorkQueue(store, "call", groups, needed) for _ in range(engines)]
    samples = [i for group in groups for i in (*group.fresh, *group.partial)]
    draw.shuffle(samples)
    missing = {g: group.size for g, group in enumerate(groups)}
    complete: list[int] = []
    for sample in samples:
        queues[0].refresh()
        assert queues[0].is_done() == (len(complete) >= needed)
        queues[draw.randrange(engines)].mark_done(sample)
        (group,) = [g for g, members in enumerate(groups) if sample in members.fresh + members.partial]
        missing[group] -= 1
        complete += [group] if not missing[group] else []
    for queue in queues:
        queue.refresh()
        assert queue.is_done()
    orders = [queue.completion_order for queue in queues]
    assert first_complete_groups(orders, needed) == sorted(complete[:needed])


def test_dynamic_queue_forgets_groups_of_other_engines_in_one_request():
    store = CountedStore()
    groups = make_groups([(8, 0)] * 50)
    first, second = (DynamicWorkQueue(store, "call", groups, 50) for _ in range(2))
    assert len(first.pop(400)) == 400
    store.requests.clear()
    assert second.pop(4) == []
    assert store.requests == ["add", "multi_get"]


def test_dynamic_queue_single_samples_cost_two_requests_each():
    store = CountedStore()
    queue = DynamicWorkQueue(store, "call", make_groups([(1, 0)] * 9), 9)
    for sample in queue.pop(9):
        queue.mark_done(sample)
    assert queue.is_done() and store.requests == ["add"] * 18
    store.requests.clear()
    queue.delete_keys()
    assert store.requests == ["delete_key"] * 2


def test_work_queue_refresh_is_one_request():
    store = CountedStore()
    queue = DynamicWorkQueue(store, "call", make_groups([(1, 0)] * 9), 1)
    queue.refresh()
    store.requests.clear()
    queue.refresh()
    assert queue.can_queue(8) and not queue.is_done()
    assert store.requests == ["multi_get"]


def test_work_queue_delete_keys_empties_the_store():
    groups, store = make_groups([(3, 0)] * 3), HashStore()
    queue = DynamicWorkQueue(store, "call", groups, 3)
    for sample in queue.pop(9):
        queue.mark_done(sample)
    assert queue.is_done() and store.num_keys() > 0
    queue.delete_keys()
    assert store.num_keys() == 0


def test_work_queue_unknown_sample_raises():
    with pytest.raises(KeyError):
        DynamicWorkQueue(HashStore(), "call", make_groups([(1, 0)]), 1).mark_done(random.randrange(5, 9))
