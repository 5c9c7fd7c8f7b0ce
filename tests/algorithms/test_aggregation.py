"""Means over tokens, sequences and trajectories, confidence intervals, and metrics of the best of k samples."""

import itertools
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_mg.algorithms.aggregation import MODES, aggregate, normalizer, segment_sums, segment_totals
from verl_mg.algorithms.at_k import avg_at_k, maj_at_k, pass_at_k
from verl_mg.algorithms.intervals import ENUMERATED, mean_interval, paired_p_value, student_quantile
from verl_mg.errors import UserError

LENGTHS = (5, 1, 7, 3, 4, 2)
EMPTY = 3  # this sequence has no masked token
MAX_LENGTH = 16


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Loss, mask and sequence ids of six sequences; NaN outside the mask."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = (torch.rand(len(ids), generator=generator) < 0.6) & (ids != EMPTY)
    mask[[0, 5, 12, 18, 20]] = True
    loss = torch.randn(len(ids), generator=generator, dtype=torch.float64)
    return torch.where(mask, loss, torch.nan), mask, ids


def global_normalizer(mode: str) -> float:
    _, mask, ids = batch()
    return normalizer(mode, int(mask.sum()), len(set(ids[mask].tolist())), MAX_LENGTH)


def by_hand(mode: str) -> tuple[float, list[float]]:
    """The loss of the whole batch and its derivative by each token's loss."""
    loss, mask, ids = (column.tolist() for column in batch())
    sequences: dict[int, list[int]] = {}
    for token, (counts, sequence) in enumerate(zip(mask, ids, strict=True)):
        if counts:
            sequences.setdefault(sequence, []).append(token)
    weights = [0.0] * len(loss)
    for tokens in sequences.values():
        for token in tokens:
            weights[token] = {
                "token-mean": 1 / sum(mask),
                "seq-mean-token-sum": 1 / len(sequences),
                "seq-mean-token-mean": 1 / len(tokens) / len(sequences),
                "seq-mean-token-sum-norm": 1 / (len(sequences) * MAX_LENGTH),
            }[mode]
    return sum(w * x for w, x in zip(weights, loss, strict=True) if w), weights


def value_and_gradient(mode: str, parts: list[Tensor]) -> tuple[float, Tensor]:
    """Sum over micro-batches, each the tokens at `parts[i]`, with sequence ids of its own."""
    loss, mask, ids = batch()
    loss.requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for tokens in parts:
        _, local_ids = torch.unique(ids[tokens], return_inverse=True)
        total = total + aggregate(loss[tokens], mask[tokens], local_ids, mode, global_normalizer(mode))
    total.backward()
    return total.item(), loss.grad


def check(mode: str, value: float, gradient: Tensor) -> None:
    expected, weights = by_hand(mode)
    assert abs(expected) > 1e-3 and (gradient != 0).sum() == batch()[1].sum()
    assert value == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient, torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=1e-15)


def splits() -> dict[str, list[Tensor]]:
    """Micro-batches of whole sequences: one, one a sequence, uneven ones, shuffled rows."""
    ids = batch()[2]

    def rows(*sequences: int) -> Tensor:
        return torch.cat([torch.nonzero(ids == sequence)[:, 0] for sequence in sequences])

    shuffled = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    return {
        "whole": [torch.arange(len(ids))],
        "one each": [rows(sequence) for sequence in range(len(LENGTHS))],
        "uneven": [rows(4, 0, 3), rows(5), rows(2, 1)],
        "shuffled": [shuffled],
        "with an empty one": [rows(0, 1, 2, 3, 4, 5), torch.empty(0, dtype=torch.int64)],
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("split", splits())
def test_any_split_gives_the_loss_of_the_batch(mode, split):
    check(mode, *value_and_gradient(mode, splits()[split]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_trajectories_with_rows_in_several_micro_batches_are_one_sequence_each(mode, seed):
    """The six sequences are trajectories: their tokens are rows of any lengths, in any micro-batches."""
    loss, mask, ids = batch()
    loss.requires_grad_()
    generator = torch.Generator().manual_seed(seed)
    micro_batch = torch.randint(0, 5, ids.shape, generator=generator)
    rows = 10 * ids + torch.randint(0, 3, ids.shape, generator=generator)
    counts = torch.tensor([int((mask & (ids == i)).sum()) for i in ids.tolist()])
    total = torch.zeros((), dtype=torch.float64)
    for number in range(5):
        here = micro_batch == number
        columns = (loss[here], mask[here], rows[here])
        total = total + aggregate(*columns, mode, global_normalizer(mode), counts[here])
    total.backward()
    check(mode, total.item(), loss.grad)


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_mask_is_zero_with_a_gradient(mode):
    loss = torch.full((3,), torch.nan, requires_grad=True)
    ids = torch.zeros(3, dtype=torch.int64)
    total = aggregate(loss, torch.zeros(3, dtype=torch.bool), ids, mode, normalizer(mode, 0, 0, MAX_LENGTH))
    total.backward()
    assert total.item() == 0.0
    assert loss.grad.tolist() == [0.0, 0.0, 0.0]


def test_normalizer_of_each_mode_is_the_documented_count():
    assert [normalizer(mode, 100, 8, 32) for mode in MODES] == [100.0, 8.0, 8.0, 256.0]


def test_aggregation_with_invalid_arguments_raises():
    column, unknown = torch.zeros(1), "'mean' is unknown. Write one of token-mean, seq-mean-token-sum, "
    with pytest.raises(UserError, match=unknown):
        normalizer("mean", 1, 1, None)
    with pytest.raises(UserError, match=unknown):
        aggregate(column, column.bool(), column.long(), "mean", 1.0)
    with pytest.raises(UserError, match="max_length is None"):
        normalizer("seq-mean-token-sum-norm", 1, 1, None)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(-9, 9), st.sampled_from([-5, 0, 1, 3])), max_size=12))
def test_segment_totals_of_random_ids_equal_loops(entries):
    values = torch.tensor([value for value, _ in entries], dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([number for _, number in entries], dtype=torch.int64)
    found = segment_totals(values, ids)
    expected = [sum(value for value, other in entries if other == number) for _, number in entries]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    found.square().sum().backward()
    shares = [sum(other == number for _, other in entries) for _, number in entries]
    slopes = [2 * total * share for total, share in zip(expected, shares, strict=True)]
    torch.testing.assert_close(values.grad, torch.tensor(slopes, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_segments_and_counts_of_bools():
    assert segment_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 1])).tolist() == [3.0, 4.0]
    assert segment_totals(torch.tensor([True, True, False]), torch.tensor([9, 2, 9])).tolist() == [1.0, 1.0, 1.0]


@pytest.fixture(scope="module")
def stats():
    return pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 30, 999])
def test_student_quantile_equals_scipy(stats, degrees):
    for probability in (0.9, 0.975, 0.9995):
        assert student_quantile(probability, degrees) == pytest.approx(stats.t.ppf(probability, degrees), rel=1e-10)


def test_mean_interval_equals_scipy_and_resampling_of_prompts(stats):
    scores = torch.rand(60, generator=torch.Generator().manual_seed(1)) ** 2
    found, values = mean_interval(scores), scores.double().numpy()
    assert (found.low, found.high) == pytest.approx(stats.t.interval(0.95, 59, values.mean(), stats.sem(values)))
    draws = np.random.default_rng(0).choice(values, (20_000, 60)).mean(1)
    assert found.standard_error == pytest.approx(draws.std(), rel=0.03)
    assert (found.low, found.high) == pytest.approx(np.quantile(draws, [0.025, 0.975]), abs=0.01)


def test_standard_error_is_clustered_by_prompt():
    drawn = torch.rand(12, 8, generator=torch.Generator().manual_seed(2))
    samples = (drawn < torch.linspace(0, 1, 12)[:, None]).double()
    mean, total = samples.mean(), samples.numel()
    # The formula for clusters of arXiv:2411.00640, section 2.2: products of all pairs of a prompt.
    clustered = float((samples - mean).sum(1).square().sum()) ** 0.5 / total
    assert mean_interval(samples.mean(1)).standard_error == pytest.approx(clustered * (12 / 11) ** 0.5)
    independent = float(samples.std() / total**0.5)
    assert clustered > 1.5 * independent


def test_equal_scores_have_an_interval_only_where_they_are_bounded(stats):
    none, every = mean_interval(torch.zeros(30), bounded=True), mean_interval(torch.ones(30), bounded=True)
    assert (none.low, every.high) == (0.0, 1.0)
    # With this rate of success 30 failures have a probability of 5 %.
    assert stats.binom.pmf(0, 30, none.high) == pytest.approx(0.05) and every.low == pytest.approx(1 - none.high)
    assert mean_interval(torch.zeros(30)).high == 0.0
    assert mean_interval(torch.ones(1)).low is None
    assert mean_interval(torch.tensor([0.0, 0.1, 0.9]), bounded=True).low == 0.0


def test_paired_p_value_equals_enumeration_of_all_signs(stats):
    values = torch.tensor([0.5, -0.25, 0.25, 1.0, 0.0, 0.125, -0.5, 0.75])
    found = stats.permutation_test((values.numpy(),), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert paired_p_value(values) == pytest.approx(found.pvalue)


@pytest.mark.parametrize(("better", "worse"), [(9, 3), (30, 14), (0, 0), (5, 5)])
def test_paired_p_value_of_right_and_wrong_is_the_exact_test_of_mcnemar(stats, better, worse):
    values = torch.cat([torch.ones(better), -torch.ones(worse), torch.zeros(20)])
    exact = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert paired_p_value(values) == pytest.approx(exact, abs=1e-12 if better + worse <= ENUMERATED else 0.006)


def test_paired_p_values_are_uniform_if_both_models_are_equal(stats):
    generator = torch.Generator().manual_seed(3)
    found = [paired_p_value(torch.randn(10, generator=generator)) for _ in range(300)]
    assert stats.kstest(found, "uniform").pvalue > 0.01


CORRECT = torch.tensor([[0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 1]]).bool()


@pytest.mark.parametrize("k", range(1, 7))
def test_pass_and_mean_over_all_subsets(k):
    for found, fold in ((pass_at_k(CORRECT, k), max), (avg_at_k(CORRECT, k), statistics.fmean)):
        subsets = [itertools.combinations(row, k) for row in CORRECT.tolist()]
        expected = [statistics.fmean(map(fold, tries)) for tries in subsets]
        assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_many_tries_lose_no_digits():
    correct = torch.zeros(1, 2000, dtype=torch.bool)
    correct[0, 0] = True
    assert pass_at_k(correct, 1).item() == 1 / 2000
    assert pass_at_k(correct, 1000).item() == 0.5


def test_maj_at_k_of_known_answers_is_the_majority_reward():
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


def test_at_k_with_invalid_arguments_raises():
    for k in (0, 7):
        with pytest.raises(UserError, match=f"k is {k}, but each problem has 6 tries"):
            pass_at_k(CORRECT, k)
    with pytest.raises(UserError, match="4 lists of 6"):
        maj_at_k([["1"]], CORRECT, 2)
