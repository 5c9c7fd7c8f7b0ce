"""Curriculum: prompts outside the band of pass rates are skipped for a while, and none is lost."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.walks import ids, mixed, resume, some
from verl_mg.data import Curriculum, Mixture, PromptSet
from verl_mg.errors import UserError

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
    assert [curriculum.rate(i) for i in range(3)] == [0.5, 0.0, None]
    curriculum.observe([0, 0], [1.0, 1.0])
    assert curriculum.rate(0) == 0.75 * 0.5 + 0.25
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
    """All outside, more requested than there are, for longer than any `revisit`."""
    curriculum = observed(Curriculum(some(4), **BAND, revisit=1000), dict.fromkeys(range(4), 0.0))
    seen = Counter(i for _ in range(20) for i in ids(curriculum.take(11)))
    assert sum(seen.values()) == 220
    assert max(seen.values()) - min(seen.values()) <= 20
    (only,) = observed(Curriculum(some(1), **BAND), {0: 1.0}).take(1)
    assert only.id == 0


@given(st.integers(2, 9), st.integers(0, 20), st.integers(1, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_take_pass_across_epochs_repeats_no_prompt(size, before, revisit, data):
    """A turn that crosses an epoch meets prompts twice, skipped or due, and takes them once."""
    curriculum = observed(Curriculum(some(size), **BAND, revisit=revisit), dict.fromkeys(range(size), 0.0))
    for n in [before, *data.draw(st.lists(st.integers(1, size // 2), max_size=6))]:
        taken = ids(curriculum.take(n))
        assert n > size // 2 or len(set(taken)) == n


def test_take_all_outside_returns_every_prompt_in_time():
    """With every prompt at 0 and small takes, each comes again and again."""
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
            walk = resume(Curriculum(source_of(seed, several), **BAND, revisit=2), walk)  # type: ignore[assignment]
        rewards = [float(draw.random() < prompt.id / 7) for prompt in taken]
        for curriculum in (ever, walk):
            curriculum.observe(ids(taken), rewards)
        if draw.random() < 0.5:
            walk = resume(Curriculum(source_of(seed, several), **BAND, revisit=2), walk)  # type: ignore[assignment]
    assert ever.state() == walk.state()


def test_load_state_of_other_data_is_refused():
    old = Curriculum(some(5), **BAND)
    with pytest.raises(UserError, match="kind=curriculum, now kind=set"):
        resume(some(5), old)
    with pytest.raises(UserError, match="kind=set, now kind=curriculum"):
        resume(Curriculum(some(5), **BAND), some(5))
    with pytest.raises(UserError, match="prompts=5, now prompts=6"):
        resume(Curriculum(some(6), **BAND), old)
