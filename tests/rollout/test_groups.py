"""Bookkeeping of groups: ids, waiting groups and samples through calls and checkpoints; the bound of staleness.

The bound is tested over random timings of engines that are simulated token by token.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from verl_mg.data import Prompt
from verl_mg.engines.engine import Sample
from verl_mg.rollout.groups import (
    FIRST_EVALUATION_ID,
    Group,
    GroupBuffer,
    GroupState,
    RolloutState,
    SavedGroup,
    StalenessBound,
    first_complete,
    sample_number,
)


def make_prompts(count: int, first: int = 0) -> list[Prompt]:
    return [Prompt(i, (i,), str(i), None, {}) for i in range(first, first + count)]


def make_sample(i: int, finish: str = "stop", length: int = 2) -> Sample:
    return Sample(i, (5,) * length, (0.0,) * length, (0,) * length, finish)


def run_call(buffer: GroupBuffer, needed: int, draw: random.Random, keep_rest: bool) -> list[int]:
    """Completes random samples until enough groups are complete; the others are aborted. Returns the ids returned."""
    call = list(buffer.training)
    queued = [group for group in call if group.num_missing]
    missing = [i for group in queued for i in group.ids if i not in group.done]
    draw.shuffle(missing)
    left = {group: group.num_missing for group in queued}
    order: dict[int, int] = {}
    for i in missing:
        buffer.partial.pop(i, None)  # resumed
        if len(order) >= needed - (len(call) - len(queued)):
            sample = make_sample(i, "abort", draw.randrange(3))
            buffer.partial |= {i: sample} if sample.tokens else {}
            continue
        buffer.completed[i] = make_sample(i)
        (group,) = [group for group in queued if i in group.ids]
        left[group] -= 1
        if not left[group]:
            order[queued.index(group)] = len(order)
    buffer.update(call, buffer.completed, buffer.partial)
    selected = first_complete(call, queued, [order], needed)
    assert all(group.state is GroupState.COMPLETE for group in selected)
    returned = [i for group in selected for i in group.ids]
    assert set(returned) <= buffer.completed.keys()
    buffer.remove(selected, GroupState.RETURNED)
    if not keep_rest:
        buffer.remove(list(buffer.training), GroupState.DROPPED)
    rest = {i for group in buffer.training for i in group.ids}
    assert buffer.completed.keys() | buffer.partial.keys() <= rest
    return returned


@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
def test_calls_with_extra_prompts_return_each_sample_once(requested, extra, samples, partial, draw):
    buffer, returned, first = GroupBuffer(), [], 0
    for _ in range(5):
        count = requested + max(0, extra - len(buffer.training))
        buffer.add(make_prompts(count, first), samples)
        first += count
        ids = run_call(buffer, requested, draw, partial)
        assert len(ids) == requested * samples
        returned += ids
        assert len(buffer.training) == (extra if partial else 0)
    returned += run_call(buffer, len(buffer.training), draw, partial)
    assert len(returned) == len(set(returned)) and not buffer.completed and not buffer.partial
    assert buffer.next_id == first * samples
    if partial:
        assert sorted(returned) == list(range(buffer.next_id))


def test_evaluation_groups_have_other_ids_and_change_nothing_of_training():
    buffer = GroupBuffer()
    buffer.add(make_prompts(4), 2)
    run_call(buffer, 2, random.Random(0), keep_rest=True)
    before = (buffer.next_id, list(buffer.training), dict(buffer.completed), dict(buffer.partial))
    groups = buffer.add_evaluation(make_prompts(3, 50), 2, buffer.next_id)
    ids = [i for group in groups for i in group.ids]
    assert [sample_number(i) for i in ids] == list(range(8, 14)) and min(ids) >= FIRST_EVALUATION_ID
    buffer.completed |= {i: make_sample(i) for i in ids}
    buffer.update(groups, buffer.completed, ())
    assert [buffer.prompt_of(i).id for i in ids] == [50, 50, 51, 51, 52, 52]
    buffer.remove(groups, GroupState.RETURNED)
    assert (buffer.next_id, buffer.training, buffer.completed, buffer.partial) == before


def test_withdrawn_candidates_free_their_ids():
    buffer = GroupBuffer()
    groups = buffer.add(make_prompts(5), 3)
    buffer.withdraw(groups[2:])
    assert buffer.next_id == 6 and buffer.training == groups[:2]
    assert buffer.add(make_prompts(1, 9), 3)[0].ids == range(6, 9)


def test_groups_loaded_regenerate_samples_that_no_rank_has():
    prompts = {prompt.id: prompt for prompt in make_prompts(2)}
    group = Group(prompts[1], range(4, 8), frozenset({4, 5}), frozenset({6}))
    state = RolloutState(next_id=9, groups=[group.saved()], in_flight=None, prefetched=[], prefetched_samples=0)
    state = RolloutState.model_validate_json(state.model_dump_json())
    buffer = GroupBuffer()
    completed, partial = {4: make_sample(4), 99: make_sample(99)}, {6: make_sample(6, "abort")}
    buffer.load(state, prompts.__getitem__, completed, {}, {4, 99}, set())
    (missing,) = buffer.training
    assert missing.prompt == prompts[1] and missing.done == {4} and missing.fresh == (5, 6, 7) and not missing.partial
    assert buffer.completed.keys() == {4} and not buffer.partial and buffer.next_id == 9
    buffer.load(state, prompts.__getitem__, completed, partial, {4, 5, 99}, {6})
    assert buffer.training[0].saved() == group.saved() and buffer.partial == partial


@pytest.mark.parametrize(
    ("starts", "next_id", "message"),
    [([0, 1], 4, "sample 1 belongs to two prompts"), ([0, 2], 3, "next_id is 3, but sample 3 exists")],
)
def test_rollout_state_with_impossible_ids_raises(starts, next_id, message):
    groups = [SavedGroup(prompt=0, first=first, samples=2, done=[], partial=[]) for first in starts]
    with pytest.raises(ValidationError, match=message):
        RolloutState(next_id=next_id, groups=groups, in_flight=None, prefetched=[], prefetched_samples=0)


# -- the bound of staleness


class Engine:
    """Has slots; a sample takes its length in ticks, and notes the version of each of its tokens."""

    def __init__(self, slots, lengths):
        self.slots, self._lengths = slots, lengths
        self.queue, self.running, self.completed = [], {}, {}

    def tick(self, version):
        while self.queue and len(self.running) < self.slots:
            self.running[self.queue.pop(0)] = []
        for sample, versions in list(self.running.items()):
            versions.append(version)
            if len(versions) >= self._lengths(sample):
                self.completed[sample] = self.running.pop(sample)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["continue", "drop"]))
def test_tokens_that_are_trained_are_never_older_than_the_bound(data, bound, batch, group_size, stale):
    draw = data.draw(st.randoms(use_true_random=False))
    longest = data.draw(st.sampled_from([1, 4, 40]))
    lengths: dict[int, int] = {}
    engine = Engine(draw.randint(1, 8), lambda i: lengths.setdefault(i, draw.randint(1, longest)))
    versions, buffer = StalenessBound(bound, stale), GroupBuffer()
    versions.push(0)
    prompts = iter(range(10**6))
    returned_ids: set[int] = set()

    def admit(count):
        for group in buffer.add(make_prompts(count, next(prompts)), group_size):
            engine.queue += group.ids

    def drop(dropped):
        for group in dropped:
            for i in group.ids:
                engine.completed.pop(i, None), engine.running.pop(i, None)
                engine.queue = [waiting for waiting in engine.queue if waiting != i]
        buffer.remove(dropped, GroupState.DROPPED)
        admit(len(dropped))

    admit(batch)
    for version in range(12):
        versions.adapt(sum(all(i in engine.completed for i in group.ids) for group in buffer.training), batch)
        admit(batch + versions.num_ahead(batch) - len(buffer.training))
        returned = []
        while len(returned) < batch:
            oldest = {i: min(v) for i, v in engine.completed.items()}
            chosen, dropped = versions.select(buffer.training, oldest, batch - len(returned))
            buffer.remove(chosen, GroupState.RETURNED)
            drop(dropped)
            returned += chosen
            engine.tick(version)
        assert len(buffer.training) <= bound * batch + len(returned)
        for group in returned:
            written = {i: engine.completed.pop(i) for i in group.ids}
            assert not returned_ids & written.keys()
            returned_ids |= written.keys()
            tokens = [v for sample in written.values() for v in sample]
            trained = [v for v in tokens if v >= versions.oldest_allowed]
            assert all(versions.age(v) == version - v <= bound for v in trained)
            if len(set(tokens)) == 1 or stale == "drop":  # the order of the buffer makes no group too old
                assert trained == tokens
        for _ in range(draw.randint(0, 12)):
            engine.tick(version)
        versions.push(version + 1)
        if stale == "drop":
            drop(versions.too_old(buffer.training, [(i, min(v)) for i, v in engine.running.items() if v]))


def test_outstanding_groups_follow_the_need_of_training():
    bound, wanted = StalenessBound(4, "continue", [0]), []
    for num_complete in (0, 0, 0, 3, 4, 4, 9, 2):
        bound.adapt(num_complete, 2)
        wanted.append(bound.num_ahead(2))
    assert wanted == [4, 6, 8, 7, 5, 3, 2, 2]


def test_groups_that_engines_cannot_run_by_their_load_are_not_outstanding():
    bound, wanted = StalenessBound(4, "continue", [0]), []
    for num_runnable in (3, 3, 0, 9, 9):
        bound.num_runnable = num_runnable
        bound.adapt(0, 2)
        wanted.append(bound.num_ahead(2))
    assert wanted == [4, 5, 2, 4, 6] and bound.largest(2) == 8, "never more than the staleness permits"
