"""Statistics of two policies' log-probs against loops in Python floats, over any split of the tokens."""

import math
import statistics as python_statistics

import pytest
import torch
from torch import Tensor

from verl_mg.algorithms.mismatch import merge, statistics, summarize


def summary_by_hand(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Of (old, rollout) for each scored token."""
    differences = [old - rollout for old, rollout in pairs]
    probabilities = [[math.exp(pair[i]) for pair in pairs] for i in (0, 1)]
    ratios = [math.exp(d) for d in differences]
    mean = python_statistics.fmean
    return {
        "mean_abs": mean(abs(d) for d in differences),
        "max_abs": max(abs(d) for d in differences),
        "mean_ratio": mean(ratios),
        "max_ratio": max(ratios),
        "k1": mean(-d for d in differences),
        "k3": mean(math.exp(d) - 1 - d for d in differences),
        "rollout_perplexity": math.exp(-mean(rollout for _, rollout in pairs)),
        "trainer_perplexity": math.exp(-mean(old for old, _ in pairs)),
        "effective_samples": sum(ratios) ** 2 / sum(r * r for r in ratios) / len(ratios),
        "correlation": python_statistics.correlation(*probabilities),
        "by_depth/0-1k": mean(abs(d) for d in differences),
    }


def tokens(count: int = 23, seed: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """old, rollout, mask, positions; NaN outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    rollout = torch.rand(count, generator=generator).log()
    old = rollout + torch.randn(count, generator=generator) * 0.3
    mask = torch.rand(count, generator=generator) < 0.7
    return torch.where(mask, old, torch.nan), torch.where(mask, rollout, torch.nan), mask, torch.arange(count)


def first_positions(column: Tensor) -> Tensor:
    return torch.arange(len(column))


def pairs(old: Tensor, rollout: Tensor, mask: Tensor, _: Tensor) -> list[tuple[float, float]]:
    return list(zip(old[mask].tolist(), rollout[mask].tolist(), strict=True))


def test_mismatch_of_random_parts_equals_loops():
    found = summarize(statistics(*tokens()))
    expected = summary_by_hand(pairs(*tokens()))
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-9)
    assert 0 < found["effective_samples"] < 1 and found["k3"] > 0 and 0.5 < found["correlation"] < 1


@pytest.mark.parametrize("cuts", [(), (1,), (4, 4, 19), tuple(range(1, 23))])
@pytest.mark.parametrize("shuffled", [False, True])
def test_any_split_gives_the_summary_of_the_whole(cuts, shuffled):
    columns = tokens()
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1)) if shuffled else torch.arange(23)
    parts = [statistics(*(column[part] for column in columns)) for part in order.tensor_split(cuts)]
    expected = summarize(statistics(*columns))
    assert summarize(merge(parts)) == pytest.approx(expected, rel=1e-12)
    assert summarize(merge([merge(parts[:2]), {}, merge(parts[2:])])) == pytest.approx(expected, rel=1e-12)


def name_of_range(position: int) -> str:
    end = 1
    while position >= end * 1024:
        end *= 2
    return f"{end // 2}k-{end}k" if end > 1 else "0-1k"


def deep_tokens() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same on both sides of the ends of ranges, and 40 times as wrong after 5,000 tokens; none has 4k to 8k."""
    positions = torch.tensor([0, 1023, 1024, 2047, 2048, 4095, 8192, 16383, 16384, 100_000, 2**20 - 1, 2**20, 2**21])
    positions = positions.repeat_interleave(3)
    old, rollout, mask, _ = tokens(len(positions))
    return torch.where(positions > 5000, rollout + 40 * (old - rollout), old), rollout, mask, positions


def test_difference_by_depth_equals_loops_over_positions():
    old, rollout, mask, positions = deep_tokens()
    expected: dict[str, list[float]] = {}
    for i in mask.nonzero().flatten().tolist():
        name = f"by_depth/{name_of_range(int(positions[i]))}"
        expected.setdefault(name, []).append(abs(float(old[i]) - float(rollout[i])))
    assert {"by_depth/0-1k", "by_depth/1k-2k", "by_depth/64k-128k", "by_depth/1024k-2048k"} < expected.keys()
    found = {name: value for name, value in summarize(statistics(*deep_tokens())).items() if "/" in name}
    assert list(found) == list(expected) and "by_depth/4k-8k" not in found
    means = {name: python_statistics.fmean(values) for name, values in expected.items()}
    assert found == pytest.approx(means, rel=1e-9)
    assert min(value for name, value in found.items() if name > "by_depth/8k") > 0.3 > found["by_depth/0-1k"]


@pytest.mark.parametrize("seed", range(3))
def test_difference_by_depth_of_any_split_is_that_of_the_whole(seed):
    columns = deep_tokens()
    order = torch.randperm(len(columns[0]), generator=torch.Generator().manual_seed(seed))
    parts = [statistics(*(column[part] for column in columns)) for part in order.tensor_split((1, 9, 9, 30))]
    whole = summarize(statistics(*columns))
    found = summarize(merge([merge(parts[3:]), *parts[:3]]))
    assert found == pytest.approx(whole, rel=1e-12) and list(found) == list(whole)


def test_equal_log_probs():
    _, rollout, mask, positions = tokens()
    found = summarize(statistics(rollout, rollout, mask, positions))
    assert [found[name] for name in ("mean_abs", "max_abs", "k1", "k3", "by_depth/0-1k")] == [0.0] * 5
    assert [found[name] for name in ("mean_ratio", "max_ratio", "effective_samples")] == [1.0] * 3
    assert found["correlation"] == pytest.approx(1, rel=1e-12)
    assert found["rollout_perplexity"] == found["trainer_perplexity"] > 1


def test_k1_and_k3_estimate_the_divergence_of_the_rollout_from_the_trainer():
    generator = torch.Generator().manual_seed(0)
    trainer, rollout = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.3, 0.3, 0.4])
    drawn = torch.multinomial(rollout, 200_000, replacement=True, generator=generator)
    mask, positions = torch.ones_like(drawn).bool(), first_positions(drawn)
    found = summarize(statistics(trainer.log()[drawn], rollout.log()[drawn], mask, positions))
    divergence = float((rollout * (rollout / trainer).log()).sum())
    assert found["k1"] == pytest.approx(divergence, abs=0.01) and found["k3"] == pytest.approx(divergence, abs=0.01)
    assert found["mean_ratio"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("difference", [50.0, -50.0, 1e4, -1e4, -math.inf])
def test_extremes_stay_finite(difference):
    rollout = torch.tensor([-60.0, -1.0, -2.0])
    old = rollout + torch.tensor([difference, 0.1, -0.1])
    found = summarize(statistics(old, rollout, torch.ones(3, dtype=torch.bool), first_positions(old)))
    assert all(math.isfinite(value) for value in found.values()), found
    assert found["max_abs"] == min(abs(difference), 300.0)


@pytest.mark.parametrize("count", [1, 7, 10, 1001])
@pytest.mark.parametrize("value", [-0.3, -1.7, -20.1])
def test_probabilities_that_do_not_vary_have_no_correlation(count, value):
    column, mask = torch.full((count,), value), torch.ones(count, dtype=torch.bool)
    varied = torch.linspace(-3, -1, count)
    for old, rollout in ((column, column), (column, varied), (varied, column)):
        assert "correlation" not in summarize(statistics(old, rollout, mask, first_positions(old)))


def test_mismatch_without_tokens_is_empty():
    column = torch.full((3,), torch.nan)
    for size in (3, 0):
        part = column[:size]
        assert statistics(part, part, torch.zeros(size, dtype=torch.bool), first_positions(part)) == {}
    assert merge([]) == merge([{}, {}]) == summarize({}) == {}
