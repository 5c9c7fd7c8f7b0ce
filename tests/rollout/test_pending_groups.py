"""Bookkeeping of generation calls: ids, pending groups and samples, through calls and checkpoints."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from verl_mg.data import Prompt
from verl_mg.engines.engine import Sample
from verl_mg.rollout.pending_groups import GenerationCall, PendingGroup, PendingGroups, PendingGroupState, RolloutState


def make_prompts(count: int, first: int = 0) -> list[Prompt]:
    return [Prompt(i, (i,), str(i), None, {}) for i in range(first, first + count)]


def make_sample(i: int, finish: str = "stop", length: int = 2) -> Sample:
    return Sample(i, (5,) * length, (0.0,) * length, (0,) * length, finish)


def run_call(pending: PendingGroups, call: GenerationCall, draw: random.Random, keep_rest: bool) -> list[int]:
    """Completes random samples until enough groups are complete; the others are aborted. Returns the ids returned."""
    incomplete = call.incomplete
    missing = [(g, i) for g, index in enumerate(incomplete) for i in call.groups[index].missing.fresh]
    missing += [(g, i) for g, index in enumerate(incomplete) for i in call.groups[index].missing.partial]
    for i in list(pending.partial):
        if i in call.prompt_of:
            del pending.partial[i]  # resumed
    draw.shuffle(missing)
    left = {g: call.groups[index].missing.size for g, index in enumerate(incomplete)}
    order: dict[int, int] = {}
    completed, aborted = {}, {}
    for g, i in missing:
        if len(order) >= call.num_missing_groups:
            aborted[i] = make_sample(i, "abort", draw.randrange(3))
            continue
        completed[i] = make_sample(i)
        left[g] -= 1
        if not left[g]:
            order[g] = len(order)
    pending.add_results(completed, aborted)
    selected = call.select([order])
    returned = [i for index in selected for i in call.groups[index].ids]
    assert set(returned) <= pending.completed.keys()
    gone = pending.finish(call, selected, completed, set(pending.partial), keep_rest=keep_rest)
    assert set(returned) <= gone and not gone & (pending.completed.keys() | pending.partial.keys())
    return returned


@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
def test_calls_with_extra_prompts_return_each_sample_once(requested, extra, samples, partial, draw):
    pending, returned, first = PendingGroups(), [], 0
    for _ in range(5):
        count = requested + max(0, extra - len(pending))
        call = pending.new_call(make_prompts(count, first), samples, requested)
        first += count
        ids = run_call(pending, call, draw, partial)
        assert len(ids) == requested * samples
        returned += ids
        assert len(pending) == (extra if partial else 0)
    ids = run_call(pending, pending.new_call([], 0, len(pending)), draw, partial)
    returned += ids
    assert len(returned) == len(set(returned)) and not pending.completed and not pending.partial
    assert pending.next_id == first * samples
    if partial:
        assert sorted(returned) == list(range(pending.next_id))


def test_evaluation_call_between_calls_changes_neither_ids_nor_pending_samples():
    pending = PendingGroups()
    run_call(pending, pending.new_call(make_prompts(4), 2, 2), random.Random(0), keep_rest=True)
    before = (pending.next_id, list(pending.groups), dict(pending.completed), dict(pending.partial))
    call = pending.new_evaluation_call(make_prompts(3, 50), 2)
    assert [i for group in call.groups for i in group.ids] == list(range(8, 14))
    assert len(run_call(pending, call, random.Random(1), keep_rest=True)) == 6
    assert (pending.next_id, list(pending.groups), pending.completed, pending.partial) == before


def test_pending_groups_loaded_regenerate_samples_that_no_rank_has():
    prompts = {prompt.id: prompt for prompt in make_prompts(2)}
    group = PendingGroup(prompts[1], range(4, 8), frozenset({4, 5}), frozenset({6}))
    state = PendingGroupState.model_validate_json(group.state().model_dump_json())
    assert PendingGroup.from_state(state, prompts.__getitem__, {4, 5}, {6}) == group
    missing = PendingGroup.from_state(state, prompts.__getitem__, {4}, set())
    assert missing.done == {4} and missing.missing.fresh == (5, 6, 7) and missing.missing.partial == ()
    pending = PendingGroups()
    pending.load(9, [missing], {4: make_sample(4), 99: make_sample(99)}, {6: make_sample(6, "abort")})
    assert pending.completed.keys() == {4} and not pending.partial and pending.next_id == 9
    call = pending.new_call([], 0, 1)
    assert call.incomplete == [0] and not call.returns_fresh_groups_only([0]) and len(pending) == 0


@pytest.mark.parametrize(
    ("starts", "next_id", "message"),
    [([0, 1], 4, "sample 1 belongs to two prompts"), ([0, 2], 3, "next_id is 3, but sample 3 exists")],
)
def test_rollout_state_with_impossible_ids_raises(starts, next_id, message):
    groups = [PendingGroupState(prompt=0, first=first, samples=2, done=[], partial=[]) for first in starts]
    with pytest.raises(ValidationError, match=message):
        RolloutState(next_id=next_id, groups=groups, in_flight=None, prefetched=[], prefetched_samples=0)
