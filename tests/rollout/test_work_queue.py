"""Work queue over shared counters: every sample once, in any order of the engines, and groups to one engine first.

With a filter the first groups that pass are kept, in any order of engines and scores.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, Store

from tests.helpers.counted_store import CountedStore
from verl_mg.data import Prompt
from verl_mg.engines import Sampling
from verl_mg.rollout.groups import Group, first_complete
from verl_mg.rollout.work_queue import ScoreFilter, StaticShare, WorkQueue

GROUPS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)).filter(any), min_size=1, max_size=9)


PROMPT, SAMPLING = Prompt(0, (1,), "", None, {}), Sampling(max_new_tokens=1)


def make_groups(sizes: list[tuple[int, int]]) -> list[Group]:
    groups, start = [], 0
    for fresh, partial in sizes:
        end = start + fresh + partial
        groups.append(Group(PROMPT, range(start, end), partial=frozenset(range(start + fresh, end))))
        start = end
    return groups


def make_queue(store: Store, groups: list[Group], needed: int | None = None, key: str = "call", **options) -> WorkQueue:
    return WorkQueue(store, key, SAMPLING, groups, len(groups) if needed is None else needed, **options)


@given(GROUPS, st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_work_queue_concurrent_engines_start_each_fresh_sample_once(sizes, engines, slots, draw):
    groups, store = make_groups(sizes), HashStore()
    queues = [make_queue(store, groups) for _ in range(engines)]
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
    queues = [make_queue(store, groups, share=StaticShare(engine, engines)) for engine in range(engines)]
    popped = [i for queue in queues for i in (*queue.pop(2), *queue.pop(100))]
    assert popped == [i for group in groups for i in group.fresh]


def test_work_queue_prompt_stays_on_one_engine_until_all_groups_are_claimed():
    groups, store = make_groups([(8, 0)] * 6), HashStore()
    queues = [make_queue(store, groups) for _ in range(2)]
    engines_of: dict[int, set[int]] = {g: set() for g in range(6)}
    for _ in range(24):
        for engine, queue in enumerate(queues):
            for sample in queue.pop(1):
                engines_of[sample // 8].add(engine)
    assert all(len(engines) == 1 for engines in engines_of.values())
    # All engines pop from a single group.
    both = [make_queue(store, groups[:1], key="other") for _ in range(2)]
    assert [len(queue.pop(4)) for queue in both] == [4, 4]


@given(GROUPS, st.integers(1, 3), st.data(), st.randoms(use_true_random=False))
def test_work_queue_is_done_when_enough_groups_are_complete(sizes, engines, data, draw):
    groups, store = make_groups(sizes), HashStore()
    needed = data.draw(st.integers(1, len(groups)))
    queues = [make_queue(store, groups, needed) for _ in range(engines)]
    samples = [i for group in groups for i in group.ids]
    draw.shuffle(samples)
    missing = {g: group.num_missing for g, group in enumerate(groups)}
    complete: list[int] = []
    while samples:
        queues[0].refresh()
        assert queues[0].is_done() == (len(complete) >= needed)
        count = draw.randint(1, 4)
        together, samples = samples[:count], samples[count:]
        queues[draw.randrange(engines)].mark_done(together)
        for sample in together:
            (group,) = [g for g, members in enumerate(groups) if sample in members.ids]
            missing[group] -= 1
            complete += [group] if not missing[group] else []
    for queue in queues:
        queue.refresh()
        assert queue.is_done()
    assert first_complete(groups, groups, orders_of(queues), needed) == [groups[g] for g in sorted(complete[:needed])]


def test_work_queue_forgets_groups_of_other_engines_in_one_request():
    store = CountedStore()
    groups = make_groups([(8, 0)] * 50)
    first, second = (make_queue(store, groups) for _ in range(2))
    assert len(first.pop(400)) == 400
    store.requests.clear()
    assert second.pop(4) == []
    assert store.requests == ["add", "multi_get"]


def test_work_queue_single_samples_cost_two_requests_each_and_a_refresh_one():
    store = CountedStore()
    queue = make_queue(store, make_groups([(1, 0)] * 9))
    queue.refresh()
    store.requests.clear()
    queue.refresh()
    assert queue.can_queue(8) and not queue.is_done() and store.requests == ["multi_get"]
    for sample in queue.pop(9):
        queue.mark_done([sample])
    assert queue.is_done() and store.requests[1:] == ["add"] * 18
    store.requests.clear()
    queue.delete_keys()
    assert store.requests == ["delete_key"] * 2


def test_work_queue_samples_that_are_complete_together_cost_a_request_for_each_group_that_is_not():
    store = CountedStore()
    queue = make_queue(store, make_groups([(4, 0)] * 9))
    samples = queue.pop(36)
    store.requests.clear()
    queue.mark_done(samples[:22])  # five groups and half of one
    queue.mark_done(samples[22:])  # the other half and three groups
    assert queue.is_done() and store.requests == ["add"] * 4


def test_work_queue_delete_keys_empties_the_store():
    groups, store = make_groups([(3, 0)] * 3), HashStore()
    queue = make_queue(store, groups)
    for sample in queue.pop(9):
        queue.mark_done([sample])
    assert queue.is_done() and store.num_keys() > 0
    queue.delete_keys()
    assert store.num_keys() == 0


def test_work_queue_unknown_sample_raises():
    with pytest.raises(KeyError):
        make_queue(HashStore(), make_groups([(1, 0)])).mark_done([random.randrange(5, 9)])


# -- with a filter

SIZE = 2


def make_filtered_queues(store, passes, needed, num_extra, engines, scored):
    """Groups of two samples, of which group i passes by its second agent if `passes[i]`; the queue of each engine."""
    groups = make_groups([(SIZE, 0)] * len(passes))
    second = {i: float(passes[g] and i == group.ids[0]) for g, group in enumerate(groups) for i in group.ids}
    # The first agent has no turn in some of the samples.
    score = {i: ({"a": 0.5} if i % 3 else {}) | {"b": value} for i, value in second.items()}
    differ = ScoreFilter(lambda s: max(s) > min(s), lambda i: score[i] if i in scored else None, num_extra)
    return groups, [make_queue(store, groups, needed, score_filter=differ) for _ in range(engines)]


def rejected_by(queues):
    return sorted(i for queue in queues for i in queue.report()["rejected"])


def orders_of(queues):
    return [dict(queue.report()["order"]) for queue in queues]


def run_filtered(queues, scored, draw):
    """Lets engines start, complete and score samples in random order until all are done; returns those started."""
    started, in_flight, unscored = [], [], []
    while not all(queue.is_done() for queue in queues):
        step = draw.choice(["pop", "complete", "score", "refresh"])
        queue = draw.choice(queues)
        if step == "pop":
            samples = queue.pop(draw.randint(1, 3))
            started += samples
            in_flight += [(queue, sample) for sample in samples]
        elif step == "complete" and in_flight:
            owner, sample = in_flight.pop(draw.randrange(len(in_flight)))
            owner.mark_done([sample])
            unscored.append(sample)
        elif step == "score" and unscored:
            scored.add(unscored.pop(draw.randrange(len(unscored))))
        else:
            queue.refresh()
    return started


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32))
def test_filtered_queue_keeps_the_first_groups_that_pass_and_starts_no_others(passes, needed, engines, seed):
    scored: set[int] = set()
    groups, queues = make_filtered_queues(HashStore(), passes, needed, 0, engines, scored)
    started = run_filtered(queues, scored, random.Random(seed))
    passing = [i for i, is_kept in enumerate(passes) if is_kept][:needed]
    kept = first_complete(groups, groups, orders_of(queues), needed)
    assert kept == [groups[i] for i in passing]
    admitted = passing[-1] + 1 if len(passing) == needed else len(passes)
    assert sorted(started) == list(range(SIZE * admitted))
    assert rejected_by(queues) == [i for i in range(admitted) if i not in passing]
    for queue in queues:
        queue.refresh()
        assert queue.report()["started"] == admitted


@given(st.lists(st.booleans(), min_size=3, max_size=8), st.integers(1, 2), st.integers(0, 2**32))
def test_filtered_queue_with_extra_groups_keeps_those_that_pass_first(passes, num_extra, seed):
    scored: set[int] = set()
    groups, queues = make_filtered_queues(HashStore(), passes, 2, num_extra, 2, scored)
    run_filtered(queues, scored, random.Random(seed))
    kept = first_complete(groups, groups, orders_of(queues), 2)
    assert all(passes[groups.index(group)] for group in kept) and len(kept) == min(2, sum(passes))
    assert not any(passes[i] for i in rejected_by(queues))


def test_filtered_queue_requests_to_the_store_grow_with_samples_not_with_candidates():
    requests = []
    for candidates in (4, 400):
        store, scored = CountedStore(), set(range(SIZE * candidates))
        *_, (queue,) = make_filtered_queues(store, [True] * candidates, 2, 0, 1, scored)
        for sample in queue.pop(SIZE * 2):
            queue.mark_done([sample])
        queue.refresh()
        assert queue.is_done()
        requests.append(len(store.requests))
        queue.delete_keys()
    assert requests[0] == requests[1] <= 24
