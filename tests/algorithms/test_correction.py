"""Off-policy corrections against loops over sequences in Python floats."""

import math
import statistics
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_mg.algorithms.correction import (
    CRITERIA,
    RATIOS,
    drifted_sequences,
    importance_weights,
    log_ratios,
    rejected,
    weight_sums,
)
from verl_mg.algorithms.losses import clipped_policy_loss
from verl_mg.errors import UserError

LOW, HIGH = 0.7, 1.6
Sequence = list[tuple[float, float, bool]]  # (old, rollout, scored) of each token

# Sixteenths are exact in float32, and no mean of up to seven of them comes close to the bounds.
SIXTEENTHS = st.integers(-20, 20).map(lambda k: k / 16)
TOKEN = st.tuples(SIXTEENTHS, SIXTEENTHS, st.booleans())
SEQUENCES = st.lists(st.lists(TOKEN, min_size=1, max_size=7), min_size=1, max_size=6)
WEIGHTS = [(ratio, low) for ratio in RATIOS for low in (None, LOW)]
NATS = 0.21
"""Bound of k2 and k3: none of their sums and means of thirty-seconds of nats comes close."""


def differences(sequence: Sequence) -> list[float]:
    return [old - rollout for old, rollout, scored in sequence if scored]


def spread(sequence: Sequence, values: list[float]) -> list[float]:
    """Values of the scored tokens, 0 for others."""
    left = iter(values)
    return [next(left) if scored else 0.0 for *_, scored in sequence]


def of_all(how: str, values: list[float]) -> list[float]:
    """A statistic of each of some tokens, from the values of all."""
    if how == "token" or not values:
        return values
    statistic = {"sum": sum, "mean": statistics.fmean, "max": max}[how.removeprefix("sequence-")]
    return [statistic(values)] * len(values)


def weights_by_hand(ratio: str, low: float | None, sequence: Sequence) -> list[float]:
    how = {"token": "token", "sequence": "sequence-sum", "geometric": "sequence-mean"}[ratio]
    ratios = [math.exp(d) for d in of_all(how, differences(sequence))]
    kept = [r if low is None or low <= r <= HIGH else 0.0 for r in ratios]
    return spread(sequence, [min(r, HIGH) for r in kept])


def rejected_by_hand(criterion: str, sequence: Sequence) -> list[bool]:
    how, _, estimator = criterion.rpartition("-")
    estimate = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}[estimator]
    found = of_all(how, [estimate(d) for d in differences(sequence)])
    inside = [LOW <= math.exp(x) <= HIGH if estimator == "k1" else x <= NATS for x in found]
    return [bool(flag) for flag in spread(sequence, [float(not kept) for kept in inside])]


def columns(sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """old, rollout, mask, sequence ids; NaN outside the mask."""
    tokens = [token for sequence in sequences for token in sequence]
    old, rollout = (torch.tensor([t[i] if t[2] else math.nan for t in tokens]) for i in (0, 1))
    ids = torch.repeat_interleave(torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64))
    return old, rollout, torch.tensor([t[2] for t in tokens], dtype=torch.bool), ids


def table(ratio: str, low: float | None, sequences: list[Sequence]) -> Tensor:
    """(tokens, 3): weight, below, above."""
    old, rollout, mask, ids = columns(sequences)
    weights, metrics = importance_weights(ratio, log_ratios(old, rollout, mask), mask, ids, low, HIGH)
    assert weights.dtype == torch.float32 and list(metrics) == ["correction_below", "correction_above"]
    return torch.stack([weights, *metrics.values()], 1)


def flags(criterion: str, sequences: list[Sequence]) -> Tensor:
    old, rollout, mask, ids = columns(sequences)
    high = HIGH if criterion.endswith("k1") else NATS
    return rejected(criterion, log_ratios(old, rollout, mask), mask, ids, LOW, high)


EVERY = [partial(table, *weight) for weight in WEIGHTS] + [partial(flags, criterion) for criterion in CRITERIA]
KINDS = pytest.mark.parametrize("function", EVERY, ids=lambda f: "-".join(map(str, f.args)))


@settings(max_examples=40)
@example([[(-3.0, -3.0, True), (-2.0, -3.0, True), (-4.0, -3.0, True)], [(-3.5, -3.0, True)] * 2])
@given(SEQUENCES)
def test_weights_and_rejections_of_random_sequences_equal_loops(sequences):
    for ratio, low in WEIGHTS:
        expected = torch.tensor([w for sequence in sequences for w in weights_by_hand(ratio, low, sequence)])
        found = table(ratio, low, sequences)
        torch.testing.assert_close(found[:, 0], expected, rtol=2e-6, atol=0)
        if low is not None:
            assert torch.equal(found[:, 1:].sum(1).bool(), (expected == 0) & columns(sequences)[2])
    for criterion in CRITERIA:
        expected = [flag for sequence in sequences for flag in rejected_by_hand(criterion, sequence)]
        assert flags(criterion, sequences).tolist() == expected, criterion


def random_sequences() -> list[Sequence]:
    """Odd lengths, one scored token, none."""
    generator = torch.Generator().manual_seed(5)
    sequences = []
    for length in (5, 1, 7, 3, 13, 2):
        old, rollout, chance = torch.rand((3, length), generator=generator).tolist()
        scored = [length != 3 and (c < 0.7 or length == 1) for c in chance]
        sequences.append(list(zip(old, rollout, scored, strict=True)))
    return sequences


@KINDS
def test_order_and_split_of_whole_rows_change_no_bit(function):
    sequences = random_sequences()
    alone = [function([sequence]) for sequence in sequences]
    order = [4, 0, 3, 5, 2, 1]
    assert torch.equal(function(sequences), torch.cat(alone))
    assert torch.equal(function([sequences[i] for i in order]), torch.cat([alone[i] for i in order]))
    parts = [function(sequences[start:stop]) for start, stop in ((0, 1), (1, 4), (4, 6))]
    assert torch.equal(torch.cat(parts), torch.cat(alone))


@KINDS
def test_equal_log_probs_leave_everything_as_it_is(function):
    sequences = [[(old, old, scored) for old, _, scored in sequence] for sequence in random_sequences()]
    found, mask = function(sequences).float(), columns(sequences)[2]
    weights = found[:, 0] if found.ndim == 2 else 1.0 * mask
    assert torch.equal(weights, mask.float()) and not (found[:, 1:] if found.ndim == 2 else found).any()


@pytest.mark.parametrize(("ratio", "low"), WEIGHTS)
@pytest.mark.parametrize("nats", [50.0, -50.0, 1e4, -1e4])
def test_weights_of_extreme_ratios_are_finite(ratio, low, nats):
    sequences = [[(nats, 0.0, True)] * 41, [(0.0, 0.0, True)]]
    found = table(ratio, low, sequences)
    assert found.isfinite().all()
    weight = HIGH if low is None and nats > 0 else 0.0
    assert found[:41, 0].tolist() == pytest.approx([weight] * 41, rel=1e-6, abs=1e-20)
    assert found[:41, 2].tolist() == [float(nats > 0)] * 41 and found[41].tolist() == [1, 0, 0]
    assert all(flags(criterion, sequences).tolist() == [True] * 41 + [False] for criterion in CRITERIA)


@KINDS
def test_correction_without_scored_tokens_is_empty_or_zero(function):
    assert not function([[(0.0, 5.0, False)] * 3, [(1.0, -1.0, False)]]).any()
    assert len(function([])) == 0


@pytest.mark.parametrize("ratio", RATIOS)
def test_sums_of_weights_of_parts_add_up_to_those_of_tokens_or_sequences(ratio):
    def sums(sequences: list[Sequence]) -> Tensor:
        _, _, mask, ids = columns(sequences)
        return weight_sums(ratio, table(ratio, None, sequences)[:, 0], mask, ids)

    by_sequence = [[w for w in weights_by_hand(ratio, None, s) if w] for s in random_sequences()]
    counted = [w for ws in by_sequence for w in (ws if ratio == "token" else ws[:1])]
    assert sums(random_sequences()).tolist() == pytest.approx([sum(counted), len(counted)], rel=1e-6)
    parts = [sums(random_sequences()[start:stop]) for start, stop in ((0, 1), (1, 4), (4, 6))]
    torch.testing.assert_close(sum(parts), sums(random_sequences()), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("ratio", "low"), WEIGHTS)
def test_gradient_flows_through_the_loss_and_not_through_the_weights(ratio, low):
    logprobs, old, rollout = (torch.tensor(c, requires_grad=True) for c in ([-1.0, -2], [-1.2, -2.1], [-1.3, -1.9]))
    mask, ids, advantages = torch.tensor([True, True]), torch.tensor([0, 0]), torch.tensor([0.7, -0.4])
    weights, metrics = importance_weights(ratio, log_ratios(old, rollout, mask), mask, ids, low, HIGH)
    assert not any(column.requires_grad for column in (weights, *metrics.values()))
    loss, _ = clipped_policy_loss(logprobs, old, advantages, mask, 0.9, 9.0)
    (loss * weights).sum().backward()
    assert old.grad is None and rollout.grad is None
    expected = -(logprobs - old).exp() * advantages * weights
    assert logprobs.grad.abs().min() > 0
    torch.testing.assert_close(logprobs.grad, expected.detach())


def test_correction_with_invalid_arguments_raises():
    column = torch.zeros(1), torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(UserError, match="'tis' is unknown. Write one of token, sequence, geometric"):
        importance_weights("tis", *column, None, 2.0)
    with pytest.raises(UserError, match="'token-k4' is unknown. Write one of token-k1, token-k2, "):
        rejected("token-k4", *column, 0.5, 2.0)
    with pytest.raises(UserError, match="token-k3: the bound is 0"):
        rejected("token-k3", *column, 0.0, 0.0)
    for low, high in ((-0.1, 2.0), (1.1, 2.0), (0.5, 0.9), (0.5, math.inf), (math.nan, 2.0), (0.5, math.nan)):
        for function, kind in ((importance_weights, "token"), (rejected, "token-k1")):
            with pytest.raises(UserError, match="Write bounds such as"):
                function(kind, *column, low, high)


def drifted_by_hand(sequence: Sequence, advantage: float, delta: float) -> list[bool]:
    scored = [rollout - new for new, rollout, counts in sequence if counts]
    out = bool(scored) and advantage < 0 and math.fsum(scored) / len(scored) > delta
    return [out and counts for _, _, counts in sequence]


@settings(max_examples=100)
@given(SEQUENCES, st.lists(st.sampled_from([-1.0, 0.0, 0.5]), min_size=6, max_size=6))
def test_drifted_sequences_equal_loops(sequences, advantages):
    new, rollout, mask, ids = columns(sequences)
    column = torch.tensor(advantages)[ids]
    pairs = zip(sequences, advantages, strict=False)
    expected = [flag for sequence, advantage in pairs for flag in drifted_by_hand(sequence, advantage, 0.23)]
    assert drifted_sequences(new, rollout, column, mask, ids, 0.23).tolist() == expected


def test_drifted_sequences_have_no_gradient_and_a_limit_above_0():
    new, mask = torch.tensor([-3.0, -3.0], requires_grad=True), torch.ones(2, dtype=torch.bool)
    given = new, -torch.ones(2), -torch.ones(2), mask, torch.zeros(2, dtype=torch.int64)
    found = drifted_sequences(*given, 0.5)
    assert found.all() and not found.requires_grad
    with pytest.raises(UserError, match="opsm_delta is 0"):
        drifted_sequences(*given, 0.0)
