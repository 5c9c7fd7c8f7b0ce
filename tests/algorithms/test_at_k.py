"""Scores of k tries against all subsets, and majority votes by hand."""

import itertools
import statistics

import pytest
import torch

from verl_mg.algorithms.at_k import avg_at_k, maj_at_k, pass_at_k
from verl_mg.errors import UserError

CORRECT = torch.tensor([[0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 1]]).bool()


@pytest.mark.parametrize("k", range(1, 7))
def test_pass_and_mean_over_all_subsets(k: int) -> None:
    for found, fold in ((pass_at_k(CORRECT, k), max), (avg_at_k(CORRECT, k), statistics.fmean)):
        subsets = [itertools.combinations(row, k) for row in CORRECT.tolist()]
        expected = [statistics.fmean(map(fold, tries)) for tries in subsets]
        assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_many_tries_lose_no_digits() -> None:
    correct = torch.zeros(1, 2000, dtype=torch.bool)
    correct[0, 0] = True
    assert pass_at_k(correct, 1).item() == 1 / 2000
    assert pass_at_k(correct, 1000).item() == 0.5


def test_maj_at_k_of_known_answers_is_the_majority_reward() -> None:
    answers = [
        ["4", "5", "5", None],  # 5 has most votes
        ["1", "2", "2", "1"],  # a tie: 1 came first
        [None, None, None, None],
        [None, "7", None, None],
    ]
    rewards = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 1, 1], [0, 0.5, 0, 0]])
    assert maj_at_k(answers, rewards, 4).tolist() == [1, 1, 0, 0.5]
    # Two blocks of two: (4, 5) is a tie, (5, None) is not; and so on.
    assert maj_at_k(answers, rewards, 2).tolist() == [0.5, 0.5, 0, 0.25]
    assert maj_at_k(answers, rewards, 3).tolist() == [1, 0, 0, 0.5]
    assert maj_at_k(answers, rewards, 1).tolist() == [0.5, 0.5, 0, 0.125]
    assert maj_at_k([], torch.zeros(0, 4), 2).shape == (0,)


def test_at_k_with_invalid_arguments_raises() -> None:
    for k in (0, 7):
        with pytest.raises(UserError, match=f"k is {k}, but each problem has 6 tries"):
            pass_at_k(CORRECT, k)
    with pytest.raises(UserError, match="4 lists of 6"):
        maj_at_k([["1"]], CORRECT, 2)
