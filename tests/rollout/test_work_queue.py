"""Dealing work over counters: every sample once, whatever order engines ask in, and groups to one engine first."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from verl_mg.rollout.work_queue import DynamicWorkQueue, Group, StaticWorkQueue, complete_groups

GROUPS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)).filter(any), min_size=1, max_size=9)


def groups_of(sizes: list[tuple[int, int]]) -> list[Group]:
    groups, start = [], 0
    for fresh, begun in sizes:
        groups.append(Group(tuple(range(start, start + fresh)), tuple(range(start + fresh, start + fresh + begun))))
        start += fresh + begun
    return groups


@given(GROUPS, st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_engines_that_share_work_begin_each_fresh_sample_once(sizes, engines, room, draw):
    groups, store = groups_of(sizes), HashStore()
    deals = [DynamicWorkQueue(store, "call", groups, len(groups)) for _ in range(engines)]
    taken: list[int] = []
    idle: set[int] = set()
    while len(idle) < engines:
        engine = draw.randrange(engines)
        got = deals[engine].take(room)
        assert len(got) <= room
        taken += got
        idle = idle if got else idle | {engine}
    assert sorted(taken) == sorted(i for group in groups for i in group.fresh)


@given(GROUPS, st.integers(1, 4))
def test_fixed_shares_cover_all_samples_once(sizes, engines):
    groups, store = groups_of(sizes), HashStore()
    deals = [StaticWorkQueue(store, "call", groups, len(groups), engine, engines) for engine in range(engines)]
    taken = [i for deal in deals for i in (*deal.take(2), *deal.take(100))]
    assert taken == [i for group in groups for i in group.fresh]


def test_samples_of_a_prompt_stay_on_one_engine_until_others_have_nothing_else():
    groups, store = groups_of([(8, 0)] * 6), HashStore()
    deals = [DynamicWorkQueue(store, "call", groups, 6) for _ in range(2)]
    engines_of: dict[int, set[int]] = {g: set() for g in range(6)}
    for turn in range(24):
        for engine, deal in enumerate(deals):
            for sample in deal.take(1):
                engines_of[sample // 8].add(engine)
        del turn
    assert all(len(engines) == 1 for engines in engines_of.values())
    # Of one group alone everybody takes.
    both = [DynamicWorkQueue(store, "other", groups[:1], 1) for _ in range(2)]
    assert [len(deal.take(4)) for deal in both] == [4, 4]


@given(GROUPS, st.integers(1, 3), st.data(), st.randoms(use_true_random=False))
def test_a_call_is_over_when_enough_groups_are_complete(sizes, engines, data, draw):
    groups, store = groups_of(sizes), HashStore()
    enough = data.draw(st.integers(1, len(groups)))
    deals = [DynamicWorkQueue(store, "call", groups, enough) for _ in range(engines)]
    samples = [i for group in groups for i in (*group.fresh, *group.begun)]
    draw.shuffle(samples)
    left = {g: group.size for g, group in enumerate(groups)}
    finished: list[int] = []
    for sample in samples:
        assert deals[0].over() == (len(finished) >= enough)
        deals[draw.randrange(engines)].finish(sample)
        (group,) = [g for g, one in enumerate(groups) if sample in one.fresh + one.begun]
        left[group] -= 1
        finished += [group] if not left[group] else []
    assert all(deal.over() for deal in deals)
    assert complete_groups([deal.order for deal in deals], enough) == sorted(finished[:enough])


def test_counters_leave_the_store():
    groups, store = groups_of([(3, 0)] * 3), HashStore()
    deal = DynamicWorkQueue(store, "call", groups, 3)
    for sample in deal.take(9):
        deal.finish(sample)
    assert deal.over() and store.num_keys() > 0
    deal.forget()
    assert store.num_keys() == 0


def test_a_sample_that_was_not_dealt_is_a_mistake():
    with pytest.raises(KeyError):
        DynamicWorkQueue(HashStore(), "call", groups_of([(1, 0)]), 1).finish(random.randrange(5, 9))
