"""Drawing prompts early changes neither their order nor how often each is drawn."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.walks import ids
from verl_mg.data import Curriculum, Mixture, Prompt, PromptFeed, PromptSet
from verl_mg.errors import UserError

STEPS = st.lists(st.tuples(st.sampled_from(["next", "peek", "extra"]), st.integers(0, 9)), max_size=20)


def make_set(count: int, first_id: int = 0, source: str = "", seed: int = 3) -> PromptSet:
    prompts = [Prompt(i, (i,), str(i), None, {}, source) for i in range(first_id, first_id + count)]
    return PromptSet(prompts, seed=seed, source=source)


def make_mixture() -> Mixture:
    return Mixture({"a": make_set(7, 0, "a"), "b": make_set(5, 10, "b")}, {"a": 2.0, "b": 1.0})


@pytest.mark.parametrize("make", [lambda: make_set(7), make_mixture])
@given(steps=STEPS)
def test_prompt_feed_mixed_draws_return_each_prompt_once_in_order(make, steps):
    feed, reference = PromptFeed(make()), make()
    buffered: list[int] = []
    for step, n in steps:
        if step == "extra":
            assert ids(feed.draw_extra(n)) == ids(reference.take(n))
            continue
        buffered += ids(reference.take(max(0, n - len(buffered))))
        if step == "peek":
            assert ids(feed.peek(n)) == buffered[:n]
        else:
            assert ids(feed.next_batch(n)) == buffered[:n]
            buffered = buffered[n:]


@given(steps=STEPS)
def test_prompt_feed_resumed_continues_with_the_same_prompts(steps):
    feed = PromptFeed(make_mixture())
    for step, n in steps:
        {"next": feed.next_batch, "peek": feed.peek, "extra": feed.draw_extra}[step](n)
    resumed = PromptFeed(make_mixture())
    resumed.load_state(json.loads(json.dumps(feed.state())))
    for n in (3, 20):
        assert ids(resumed.next_batch(n)) == ids(feed.next_batch(n))


def test_prompt_feed_load_state_of_other_data_raises():
    state = PromptFeed(make_set(7)).state()
    with pytest.raises(UserError, match="seed"):
        PromptFeed(make_set(7, seed=4)).load_state(state)
    with pytest.raises(KeyError):
        PromptFeed(make_set(7)).load_state(state | {"buffer": [99]})


def test_prompt_feed_observe_reaches_the_curriculum():
    curriculum = Curriculum(make_set(6), low=0.2, high=0.8)
    feed = PromptFeed(curriculum)
    assert feed.has_curriculum
    assert feed.observe([1, 1, 2], [1.0, 0.0, 1.0]) == curriculum.metrics()
    assert (curriculum.rate(1), curriculum.rate(2)) == (0.5, 1.0)
    plain = PromptFeed(make_set(6))
    assert not plain.has_curriculum and plain.observe([1], [1.0]) == {}


def test_prompt_feed_lookups_are_those_of_the_prompts():
    prompts = make_mixture()
    feed = PromptFeed(prompts)
    assert (len(feed), feed.dropped, list(feed)) == (len(prompts), prompts.dropped, list(prompts))
    assert feed.first(2) == prompts.first(2) and feed.by_id(11) == prompts.by_id(11)
