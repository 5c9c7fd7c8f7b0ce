"""Orders of prompts: drawn early, by difficulty, and from several sources by weight."""

import json
import random
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mg.data import Curriculum, Mixture, Prompt, PromptFeed, Prompts, PromptSet
from verl_mg.errors import UserError

AnyPrompts = TypeVar("AnyPrompts", bound=Prompts)
STEPS = st.lists(st.tuples(st.sampled_from(["next", "peek", "extra"]), st.integers(0, 9)), max_size=20)


def some(count: int, *, first: int = 0, source: str = "", seed: int = 0) -> PromptSet:
    prompts = [Prompt(i, (i,), f"p{i}", None, {}, source) for i in range(first, first + count)]
    return PromptSet(prompts, seed=seed, source=source)


def mixed(sizes: dict[str, int], weights: dict[str, float], seed: int = 0) -> Mixture:
    sets, first = {}, 0
    for name, size in sizes.items():
        sets[name] = some(size, first=first, source=name, seed=seed)
        first += size
    return Mixture(sets, weights)


def ids(prompts: Iterable[Prompt]) -> list[int]:
    return [prompt.id for prompt in prompts]


def resume(fresh: AnyPrompts, old: Prompts) -> AnyPrompts:
    fresh.load_state(json.loads(json.dumps(old.state())))
    return fresh


def make_mixture() -> Mixture:
    return mixed({"a": 7, "b": 5}, {"a": 2.0, "b": 1.0}, 3)


@pytest.mark.parametrize("make", [lambda: some(7), make_mixture])
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
    state = PromptFeed(some(7)).state()
    with pytest.raises(UserError, match="seed"):
        PromptFeed(some(7, seed=4)).load_state(state)
    with pytest.raises(KeyError):
        PromptFeed(some(7)).load_state(state | {"buffer": [99]})


def test_prompt_feed_observe_reaches_the_curriculum():
    curriculum = Curriculum(some(6), low=0.2, high=0.8)
    feed = PromptFeed(curriculum)
    assert feed.has_curriculum
    assert feed.observe([1, 1, 2], [1.0, 0.0, 1.0]) == curriculum.metrics()
    assert curriculum.state()["rates"] == {"1": 0.5, "2": 1.0}
    plain = PromptFeed(some(6))
    assert not plain.has_curriculum and plain.observe([1], [1.0]) == {}


def test_prompt_feed_lookups_are_those_of_the_prompts():
    prompts = make_mixture()
    feed = PromptFeed(prompts)
    assert (len(feed), feed.dropped, list(feed)) == (len(prompts), prompts.dropped, list(prompts))
    assert feed.first(2) == prompts.first(2) and feed.by_id(11) == prompts.by_id(11)


BAND = {"low": 0.25, "high": 0.75}


def observed(curriculum: Curriculum, rates: dict[int, float], answers: int = 4) -> Curriculum:
    """After one visit each, at these rates."""
    for prompt, rate in rates.items():
        passed = round(rate * answers)
        curriculum.observe([prompt] * answers, [1.0] * passed + [0.0] * (answers - passed))
    return curriculum


def test_take_without_observations_equals_the_plain_set():
    curriculum, plain = Curriculum(some(7), **BAND), some(7)
    assert [prompt for n in (3, 0, 9, 2) for prompt in curriculum.take(n)] == plain.take(14)
    assert (len(curriculum), list(curriculum)) == (7, list(plain))
    assert (curriculum.by_id(2), curriculum.first(2), curriculum.dropped) == (plain.by_id(2), plain.first(2), 0)


def test_take_prompts_outside_the_band_are_skipped_in_order():
    curriculum, plain = observed(Curriculum(some(8), **BAND), {1: 0.0, 2: 1.0, 3: 0.5, 4: 0.25, 5: 0.75}), some(8)
    assert ids(curriculum.take(6)) == [i for i in ids(plain.take(8)) if i not in (1, 2)]


def test_observe_several_visits_give_a_running_average():
    curriculum = Curriculum(some(3), **BAND, pass_threshold=0.8, decay=0.75)
    curriculum.observe([0, 1, 0, 0, 0], [0.8, 0.79, 1.0, -1.0, 0.0])
    assert curriculum.state()["rates"] == {"0": 0.5, "1": 0.0}
    curriculum.observe([0, 0], [1.0, 1.0])
    assert curriculum.state()["rates"]["0"] == 0.75 * 0.5 + 0.25
    assert curriculum.metrics() == {
        "curriculum/frac_observed": 2 / 3,
        "curriculum/frac_in_band": 0.5,
        "curriculum/pass_rate": 0.3125,
    }
    assert Curriculum(some(3), **BAND).metrics() == {"curriculum/frac_observed": 0.0}


def test_observe_any_order_of_answers_gives_the_same_state():
    answers = [(i % 5, float(i % 3 == 0)) for i in range(60)]
    curricula = []
    for seed in range(3):
        random.Random(seed).shuffle(answers)
        curricula.append(Curriculum(some(5), **BAND))
        curricula[-1].observe(*zip(*answers, strict=True))
    assert curricula[0].state() == curricula[1].state() == curricula[2].state()


@pytest.mark.parametrize("revisit", [1, 3])
def test_take_skipped_prompt_returns_after_revisit_passes(revisit):
    curriculum = observed(Curriculum(some(5), **BAND, revisit=revisit), {0: 1.0})
    expected, visits = [], 0
    for prompt in ids(some(5).take(100)):
        visits += prompt == 0
        if prompt or visits % (revisit + 1) == 0:
            expected.append(prompt)
    assert [i for _ in range(40) for i in ids(curriculum.take(2))] == expected[:80]


def test_observe_better_rate_brings_a_prompt_back_inside():
    curriculum = observed(Curriculum(some(5), **BAND, revisit=9), {0: 1.0})
    curriculum.take(4)
    observed(curriculum, {0: 0.0})  # the average is now 0.5
    assert sorted(ids(curriculum.take(5))) == [0, 1, 2, 3, 4]


def test_take_too_few_inside_adds_the_nearest():
    rates = {0: 0.0, 1: 0.1, 2: 0.5, 3: 0.9, 4: 1.0, 5: 0.2}
    curriculum = observed(Curriculum(some(6), **BAND, revisit=5), rates, answers=10)
    taken = ids(curriculum.take(4))
    assert taken == [2, 5, 1, 3]  # 1 and 3 are as far away
    assert ids(curriculum.take(1)) == [2]


@pytest.mark.parametrize("seed", range(4))
def test_take_added_prompt_is_skipped_again_afterwards(seed):
    curriculum = observed(Curriculum(some(2, seed=seed), **BAND, revisit=2), {0: 0.2, 1: 0.0}, answers=10)
    assert [i for _ in range(3) for i in ids(curriculum.take(1))] == [0, 0, 1]


def test_take_all_outside_still_returns_enough_prompts():
    curriculum = observed(Curriculum(some(4), **BAND, revisit=1000), dict.fromkeys(range(4), 0.0))
    seen = Counter(i for _ in range(20) for i in ids(curriculum.take(11)))
    assert sum(seen.values()) == 220
    assert max(seen.values()) - min(seen.values()) <= 20
    (only,) = observed(Curriculum(some(1), **BAND), {0: 1.0}).take(1)
    assert only.id == 0


@given(st.integers(2, 9), st.integers(0, 20), st.integers(1, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_take_pass_across_epochs_repeats_no_prompt(size, before, revisit, data):
    curriculum = observed(Curriculum(some(size), **BAND, revisit=revisit), dict.fromkeys(range(size), 0.0))
    for n in [before, *data.draw(st.lists(st.integers(1, size // 2), max_size=6))]:
        taken = ids(curriculum.take(n))
        assert n > size // 2 or len(set(taken)) == n


def test_take_all_outside_returns_every_prompt_in_time():
    curriculum = observed(Curriculum(some(30), **BAND, revisit=2), dict.fromkeys(range(29), 0.0))
    seen = Counter(i for _ in range(200) for i in ids(curriculum.take(3)))
    assert set(seen) == set(range(30))


def test_take_mixture_keeps_its_shares():
    curriculum = observed(
        Curriculum(mixed({"a": 10, "b": 10}, {"a": 3, "b": 1}), **BAND, revisit=50), dict.fromkeys(range(2, 10), 1.0)
    )
    taken = curriculum.take(8)
    assert Counter(prompt.source for prompt in taken) == {"a": 6, "b": 2}
    assert {prompt.id for prompt in taken} >= {0, 1}
    mostly = Counter(ids(curriculum.take(40)))
    assert min(mostly[0], mostly[1]) >= max(mostly[i] for i in range(2, 10))


def source_of(seed: int, several: bool) -> PromptSet | Mixture:
    return mixed({"a": 5, "b": 3}, {"a": 2, "b": 1}, seed) if several else some(8, seed=seed)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=10), st.integers(0, 3), st.booleans(), st.randoms(use_true_random=False))
def test_load_state_resumed_sequence_equals_uninterrupted_one(takes, seed, several, draw):
    ever, walk = (Curriculum(source_of(seed, several), **BAND, revisit=2) for _ in range(2))
    for n in takes:
        taken = ever.take(n)
        assert walk.take(n) == taken
        if draw.random() < 0.5:
            walk = resume(Curriculum(source_of(seed, several), **BAND, revisit=2), walk)
        rewards = [float(draw.random() < prompt.id / 7) for prompt in taken]
        for curriculum in (ever, walk):
            curriculum.observe(ids(taken), rewards)
        if draw.random() < 0.5:
            walk = resume(Curriculum(source_of(seed, several), **BAND, revisit=2), walk)
    assert ever.state() == walk.state()


def test_load_state_of_other_data_is_refused():
    old = Curriculum(some(5), **BAND)
    with pytest.raises(UserError, match="kind=curriculum, now kind=set"):
        resume(some(5), old)
    with pytest.raises(UserError, match="kind=set, now kind=curriculum"):
        resume(Curriculum(some(5), **BAND), some(5))
    with pytest.raises(UserError, match="prompts=5, now prompts=6"):
        resume(Curriculum(some(6), **BAND), old)


WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.1, 0.2, 0.3, 1.0, 2.5, 7.0]), min_size=1)


@pytest.mark.parametrize(
    ("weights", "sources"),
    [({"a": 2, "b": 1}, "abaabaaba"), ({"a": 1, "b": 3}, "babbbabb"), ({"z": 0.1, "a": 0.1, "m": 0.1}, "zamzamz")],
)
def test_take_prompts_alternate_by_weight(weights, sources):
    taken = mixed(dict.fromkeys(weights, 9), weights).take(len(sources))
    assert "".join(prompt.source for prompt in taken) == sources


def test_take_decimal_weights_are_exact():
    """As binary fractions 0.3 is less than three times 0.1."""
    one, other = (mixed({"a": 9, "b": 9}, weights) for weights in ({"a": 0.3, "b": 0.1}, {"a": 3, "b": 1}))
    assert one.take(40) == other.take(40)


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(1, 120))
def test_take_any_weights_keep_sources_within_a_prompt_of_their_share(weights, n):
    taken = Counter(prompt.source for prompt in mixed(dict.fromkeys(weights, 3), weights).take(n))
    total = sum(Fraction(str(weight)) for weight in weights.values())
    ahead = [taken[name] - n * Fraction(str(weight)) / total for name, weight in weights.items()]
    assert sum(taken.values()) == n
    assert max(ahead) < 1
    assert min(ahead) > -len(weights)


def test_take_each_source_has_the_order_it_has_alone():
    mixture = mixed({"a": 4, "b": 7}, {"a": 3, "b": 1}, seed=5)
    taken = mixture.take(80)
    alone = {"a": some(4, source="a", seed=5), "b": some(7, first=4, source="b", seed=5)}
    for name, prompts in alone.items():
        own = [prompt for prompt in taken if prompt.source == name]
        assert own == prompts.take(len(own))


def test_take_sources_of_one_size_have_different_orders():
    mixture = mixed({"a": 20, "b": 20}, {"a": 1, "b": 1})
    taken = mixture.take(40)
    one, other = ([prompt.id % 20 for prompt in taken if prompt.source == name] for name in "ab")
    assert one != other


def test_mixture_prompts_are_found_by_id_and_in_order():
    mixture = mixed({"a": 3, "b": 2}, {"a": 1, "b": 1})
    assert (len(mixture), ids(mixture), mixture.dropped) == (5, [0, 1, 2, 3, 4], 0)
    assert ids(mixture.first(2)) == [0, 1, 3, 4]
    assert mixture.by_id(3).source == "b"
    with pytest.raises(KeyError):
        mixture.by_id(5)


def test_mixture_shared_prompt_id_is_refused():
    with pytest.raises(AssertionError, match="share a prompt id"):
        Mixture({"a": some(2), "b": some(2)}, {"a": 1, "b": 1})


@pytest.mark.parametrize(
    ("sizes", "weights", "seed", "named"),
    [
        ({"a": 3, "b": 2}, {"a": 1, "b": 2}, 0, r"weights=\[\['a', 1.0\], \['b', 1.0\]\], now"),
        ({"a": 3, "c": 2}, {"a": 1, "c": 1}, 0, "weights="),
        ({"b": 2, "a": 3}, {"a": 1, "b": 1}, 0, "weights="),
        ({"a": 3, "b": 4}, {"a": 1, "b": 1}, 0, "prompts=2, now prompts=4"),
        ({"a": 3, "b": 2}, {"a": 1, "b": 1}, 1, "seed=0, now seed=1"),
    ],
)
def test_mixture_load_state_of_other_data_is_refused(sizes, weights, seed, named):
    old = mixed({"a": 3, "b": 2}, {"a": 1, "b": 1})
    with pytest.raises(UserError, match=named):
        resume(mixed(sizes, weights, seed), old)
    with pytest.raises(UserError, match="kind=mixture, now kind=set"):
        resume(some(5), old)
