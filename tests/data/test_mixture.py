"""Shares are exact at every moment, sources keep their own epochs, and no interruption shows."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.walks import ids, mixed, resume, some
from verl_mg.data import Mixture
from verl_mg.errors import UserError

WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.1, 0.2, 0.3, 1.0, 2.5, 7.0]), min_size=1)


def test_take_prompts_alternate_by_weight():
    mixture = mixed({"a": 9, "b": 9}, {"a": 2, "b": 1})
    assert [prompt.source for prompt in mixture.take(9)] == list("abaabaaba")


def test_take_small_share_comes_late():
    mixture = mixed({"a": 9, "b": 9}, {"a": 1, "b": 3})
    assert [prompt.source for prompt in mixture.take(8)] == list("babbbabb")


def test_take_decimal_weights_are_exact():
    """As binary fractions 0.3 is less than three times 0.1."""
    one, other = (mixed({"a": 9, "b": 9}, weights) for weights in ({"a": 0.3, "b": 0.1}, {"a": 3, "b": 1}))
    assert one.take(40) == other.take(40)


def test_take_tie_goes_to_the_first_source():
    mixture = mixed({"z": 3, "a": 3, "m": 3}, {"z": 0.1, "a": 0.1, "m": 0.1})
    assert [prompt.source for prompt in mixture.take(7)] == list("zamzamz")


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(1, 120))
def test_take_any_weights_keep_sources_within_a_prompt_of_their_share(weights, n):
    taken = Counter(prompt.source for prompt in mixed(dict.fromkeys(weights, 3), weights).take(n))
    total = sum(Fraction(str(weight)) for weight in weights.values())
    ahead = [taken[name] - n * Fraction(str(weight)) / total for name, weight in weights.items()]
    assert sum(taken.values()) == n
    assert max(ahead) < 1
    assert min(ahead) > -len(weights)


def test_take_whole_shares_are_met_exactly():
    mixture = mixed({"a": 5, "b": 2, "c": 4}, {"a": 0.5, "b": 0.3, "c": 0.2})
    for _ in range(30):
        assert Counter(prompt.source for prompt in mixture.take(10)) == {"a": 5, "b": 3, "c": 2}


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


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.lists(st.integers(0, 9), max_size=8), st.integers(0, 3), st.data())
def test_load_state_splits_and_resumes_keep_the_sequence(weights, takes, seed, data):
    sizes = {name: data.draw(st.integers(1, 6), label=name) for name in weights}
    whole, walk = mixed(sizes, weights, seed), mixed(sizes, weights, seed)
    taken = []
    for n in takes:
        taken += walk.take(n)
        walk = resume(mixed(sizes, weights, seed), walk)  # type: ignore[assignment]
    assert taken == whole.take(sum(takes))


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
def test_load_state_of_other_data_is_refused(sizes, weights, seed, named):
    old = mixed({"a": 3, "b": 2}, {"a": 1, "b": 1})
    with pytest.raises(UserError, match=named):
        resume(mixed(sizes, weights, seed), old)
    with pytest.raises(UserError, match="kind=mixture, now kind=set"):
        resume(some(5), old)
