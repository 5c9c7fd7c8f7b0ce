"""Filtered work queue: the first groups that pass the filter are kept, in any order of engines and scores."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from tests.helpers.counted_store import CountedStore
from verl_mg.rollout.filtered_queue import FilteredWorkQueue
from verl_mg.rollout.work_queue import Group, first_complete_groups

SIZE = 2


def make_queues(store, passes, needed, num_extra, engines, scored):
    """Queues of several engines over groups of two samples, of which group i passes if `passes[i]`."""
    ids = [range(SIZE * i, SIZE * (i + 1)) for i in range(len(passes))]
    score = {i: float(passes[group] and i == members[0]) for group, members in enumerate(ids) for i in members}
    return [
        FilteredWorkQueue(
            store, "call", [Group(tuple(members)) for members in ids], ids, needed, num_extra,
            lambda i: score[i] if i in scored else None, lambda scores: max(scores) > min(scores),
        )
        for _ in range(engines)
    ]  # fmt: skip


def run(queues, scored, draw):
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
            owner.mark_done(sample)
            unscored.append(sample)
        elif step == "score" and unscored:
            scored.add(unscored.pop(draw.randrange(len(unscored))))
        else:
            queue.refresh()
    return started


@given(
    st.lists(st.booleans(), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_filtered_queue_keeps_the_first_groups_that_pass_and_starts_no_others(passes, needed, engines, seed):
    scored: set[int] = set()
    queues = make_queues(HashStore(), passes, needed, 0, engines, scored)
    started = run(queues, scored, Random(seed))
    passing = [i for i, is_kept in enumerate(passes) if is_kept][:needed]
    kept = first_complete_groups([queue.completion_order for queue in queues], needed)
    assert kept == passing
    admitted = passing[-1] + 1 if len(passing) == needed else len(passes)
    assert sorted(started) == list(range(SIZE * admitted))
    assert sorted(i for queue in queues for i in queue.rejected) == [i for i in range(admitted) if i not in passing]
    for queue in queues:
        queue.refresh()
        assert queue.num_admitted == admitted


@given(st.lists(st.booleans(), min_size=3, max_size=8), st.integers(1, 2), st.integers(0, 2**32))
def test_filtered_queue_with_extra_groups_keeps_those_that_pass_first(passes, num_extra, seed):
    scored: set[int] = set()
    queues = make_queues(HashStore(), passes, 2, num_extra, 2, scored)
    run(queues, scored, Random(seed))
    orders = [queue.completion_order for queue in queues]
    kept = first_complete_groups(orders, 2)
    assert all(passes[i] for i in kept) and len(kept) == min(2, sum(passes))
    assert not {i for queue in queues for i in queue.rejected} & {i for i, is_kept in enumerate(passes) if is_kept}


def test_filtered_queue_requests_to_the_store_grow_with_samples_not_with_candidates():
    requests = []
    for candidates in (4, 400):
        store, scored = CountedStore(), set(range(SIZE * candidates))
        (queue,) = make_queues(store, [True] * candidates, 2, 0, 1, scored)
        for sample in queue.pop(SIZE * 2):
            queue.mark_done(sample)
        queue.refresh()
        assert queue.is_done()
        requests.append(len(store.requests))
        queue.delete_keys()
    assert requests[0] == requests[1] <= 24
