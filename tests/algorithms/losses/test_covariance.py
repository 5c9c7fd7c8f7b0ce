"""Covariances and the choice of tokens against loops; Clip-Cov and KL-Cov against scalar formulas."""

import math
import statistics

import pytest
import torch

from verl_mg.algorithms.advantages import moments
from verl_mg.algorithms.losses import (
    clip_cov_loss,
    clipped_policy_loss,
    covariances,
    kl_cov_loss,
    priorities,
    share_count,
    tokens_at_least,
    tokens_between,
)
from verl_mg.errors import UserError

NEW = [-1.0, -0.2, -3.0, -0.7, -1.5]
OLD = [-1.1, -0.9, -2.5, -0.7, -1.0]
ADVANTAGES = [0.5, 1.0, -1.0, -0.4, 2.0]
MASK = [True, True, True, False, True]


def column(values: list[float]) -> torch.Tensor:
    return torch.where(torch.tensor(MASK), torch.tensor(values, dtype=torch.float64), torch.nan)


def test_covariances_against_a_loop():
    mask = torch.tensor(MASK)
    kept = [(p, a) for p, a, counts in zip(OLD, ADVANTAGES, MASK, strict=True) if counts]
    means = [statistics.fmean(values) for values in zip(*kept, strict=True)]
    expected = [(p - means[0]) * (a - means[1]) * counts for p, a, counts in zip(OLD, ADVANTAGES, MASK, strict=True)]
    given = column(OLD), column(ADVANTAGES), mask
    found = covariances(*given, moments(given[0], mask), moments(given[1], mask))
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert found.sum().item() == pytest.approx(3 * statistics.covariance(*zip(*kept, strict=True)), rel=1e-12)


def test_the_tokens_from_the_kth_largest_on():
    values = torch.randn(40, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(40) % 3 != 0
    expected = sorted(values[mask].tolist(), reverse=True)[:7]
    chosen = tokens_at_least(values, mask, expected[-1])
    assert sorted(values[chosen].tolist(), reverse=True) == expected and not chosen[~mask].any()


def test_counts_and_bounds():
    assert [share_count(tokens, 0.01) for tokens in (0, 99, 100, 250, 1000)] == [1, 1, 1, 2, 10]
    values, mask = torch.tensor([1.0, 2.0, 5.0, 3.0]), torch.tensor([True, True, True, False])
    assert tokens_between(values, mask, 1.0, 5.0).tolist() == [False, True, False, False]
    for fraction in (0.0, 1.5, math.nan):
        with pytest.raises(UserError, match="fraction is"):
            share_count(10, fraction)
    with pytest.raises(UserError, match="lower bound first"):
        tokens_between(values, mask, 5.0, 1.0)


def splitmix(x: int) -> int:
    """SplitMix64 in unbounded integers, as its authors print it."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def test_priorities_are_a_hash_of_the_place():
    assert splitmix(0) == 0xE220A8397B1DCDAF  # the first number of its sequence from seed 0
    ids, positions = torch.tensor([0, 5, 5, 2**40, 17]), torch.tensor([0, 1, 2, 1, 30_000])
    for seed in (0, 3, -1, 2**62):
        expected = []
        for sample, position in zip(ids.tolist(), positions.tolist(), strict=True):
            mixed = splitmix(seed % 2**64)
            for part in (sample, position):
                mixed = splitmix(mixed ^ splitmix(part))
            expected.append(((mixed >> 12) + 0.5) / 2**52)
        assert priorities(ids, positions, seed).tolist() == expected


def test_priorities_are_even_and_differ_by_seed():
    ids, positions = (axis.flatten() for axis in torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij"))
    drawn = [priorities(ids, positions, seed) for seed in (0, 1)]
    for numbers in drawn:
        assert len(numbers.unique()) == 40_000 and numbers.min() > 0 and numbers.max() < 1
        # 5 standard deviations of a bin's count of 2000 and of a correlation of 40000 pairs
        assert (torch.histc(numbers, 20, 0, 1) - 2000).abs().max() < 5 * math.sqrt(2000 * 0.95)
        assert abs(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1]) < 5 / 200
    assert abs(torch.corrcoef(torch.stack(drawn))[0, 1]) < 5 / 200


def test_clip_cov_is_ppo_without_the_cut_tokens():
    cut = torch.tensor([True, False, False, True, False])
    mask, old, advantages = torch.tensor(MASK), column(OLD), column(ADVANTAGES)
    found, ppo = column(NEW).requires_grad_(), column(NEW).requires_grad_()
    loss, metrics = clip_cov_loss(found, old, advantages, mask, cut, 0.2, 0.3, 3.0)
    other, others = clipped_policy_loss(ppo, old, advantages, mask, 0.2, 0.3, 3.0)
    loss.sum().backward()
    other.sum().backward()
    assert ppo.grad is not None and ppo.grad[0] != 0
    assert torch.equal(loss, torch.where(cut, 0.0, other))
    assert torch.equal(found.grad, torch.where(cut, 0.0, ppo.grad)) and found.grad.any()
    assert metrics["cut"].tolist() == [1, 0, 0, 0, 0]
    assert set(metrics) == {*others, "cut"}


def test_kl_cov_against_a_loop():
    penalized = [True, False, True, True, False]
    mask, leaf = torch.tensor(MASK), column(NEW).requires_grad_()
    given = column(OLD), column(ADVANTAGES), mask, torch.tensor(penalized)
    loss, metrics = kl_cov_loss(leaf, *given, 0.5)
    loss.sum().backward()
    for i, (p, q, a, counts, chosen) in enumerate(zip(NEW, OLD, ADVANTAGES, MASK, penalized, strict=True)):
        value = -a * math.exp(p - q) + 0.5 * chosen * abs(p - q)
        slope = -a * math.exp(p - q) + 0.5 * chosen * math.copysign(1, p - q)
        assert loss[i].item() == pytest.approx(value if counts else 0.0)
        assert leaf.grad[i].item() == pytest.approx(slope if counts else 0.0)
    assert metrics["penalized"].tolist() == [1, 0, 1, 0, 0]
    with pytest.raises(UserError, match="coefficient is -1"):
        kl_cov_loss(leaf, *given, -1.0)
