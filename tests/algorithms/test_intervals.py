"""Intervals and paired tests against scipy, enumeration and resampling."""

import itertools

import numpy as np
import pytest
import torch

from verl_mg.algorithms.intervals import ENUMERATED, mean_interval, paired_p_value, student_quantile

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 30, 999])
def test_student_quantile_equals_scipy(degrees):
    for probability in (0.9, 0.975, 0.9995):
        assert student_quantile(probability, degrees) == pytest.approx(stats.t.ppf(probability, degrees), rel=1e-10)


def test_mean_interval_equals_scipy_and_resampling_of_prompts():
    scores = torch.rand(60, generator=torch.Generator().manual_seed(1)) ** 2
    found, values = mean_interval(scores), scores.double().numpy()
    assert (found.low, found.high) == pytest.approx(stats.t.interval(0.95, 59, values.mean(), stats.sem(values)))
    draws = np.random.default_rng(0).choice(values, (20_000, 60)).mean(1)
    assert found.standard_error == pytest.approx(draws.std(), rel=0.03)
    assert (found.low, found.high) == pytest.approx(np.quantile(draws, [0.025, 0.975]), abs=0.01)


def test_standard_error_is_clustered_by_prompt():
    """The formula for clusters of arXiv:2411.00640, section 2.2, written out."""
    samples = (
        torch.rand(12, 8, generator=torch.Generator().manual_seed(2)) < torch.linspace(0, 1, 12)[:, None]
    ).double()
    mean, total = samples.mean(), samples.numel()
    pairs = sum(
        float((samples[prompt, i] - mean) * (samples[prompt, j] - mean))
        for prompt in range(12)
        for i, j in itertools.product(range(8), repeat=2)
    )
    clustered = pairs**0.5 / total
    assert mean_interval(samples.mean(1)).standard_error == pytest.approx(clustered * (12 / 11) ** 0.5)
    independent = float(samples.std() / total**0.5)
    assert clustered > 1.5 * independent


def test_equal_scores_have_an_interval_only_where_they_are_bounded():
    none, every = mean_interval(torch.zeros(30), bounded=True), mean_interval(torch.ones(30), bounded=True)
    assert (none.low, every.high) == (0.0, 1.0)
    # With this rate of success 30 failures have a probability of 5 %.
    assert stats.binom.pmf(0, 30, none.high) == pytest.approx(0.05) and every.low == pytest.approx(1 - none.high)
    assert mean_interval(torch.zeros(30)).high == 0.0
    assert mean_interval(torch.ones(1)).low is None
    assert mean_interval(torch.tensor([0.0, 0.1, 0.9]), bounded=True).low == 0.0


def test_paired_p_value_equals_enumeration_of_all_signs():
    values = torch.tensor([0.5, -0.25, 0.25, 1.0, 0.0, 0.125, -0.5, 0.75])
    sums = [
        abs(sum(s * v for s, v in zip(signs, values.tolist(), strict=True)))
        for signs in itertools.product((1, -1), repeat=8)
    ]
    assert paired_p_value(values) == np.mean(np.array(sums) >= abs(float(values.sum())) - 1e-9)
    found = stats.permutation_test((values.numpy(),), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert paired_p_value(values) == pytest.approx(found.pvalue)


@pytest.mark.parametrize(("better", "worse"), [(9, 3), (30, 14), (0, 0), (5, 5)])
def test_paired_p_value_of_right_and_wrong_is_the_exact_test_of_mcnemar(better, worse):
    values = torch.cat([torch.ones(better), -torch.ones(worse), torch.zeros(20)])
    exact = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert paired_p_value(values) == pytest.approx(exact, abs=1e-12 if better + worse <= ENUMERATED else 0.006)


def test_paired_p_values_are_uniform_if_both_models_are_equal():
    generator = torch.Generator().manual_seed(3)
    found = [paired_p_value(torch.randn(10, generator=generator)) for _ in range(300)]
    assert stats.kstest(found, "uniform").pvalue > 0.01
