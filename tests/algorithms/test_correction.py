"""Off-policy corrections against loops over sequences in Python floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_mg.algorithms.correction import KINDS, correct, drifted_sequences
from verl_mg.algorithms.losses import clipped_policy_loss
from verl_mg.errors import UserError

LOW, HIGH = 0.7, 1.6
Sequence = list[tuple[float, float, bool]]  # (old, rollout, scored) of each token

# Sixteenths are exact in float32, and no mean of up to seven of them comes close to the bounds.
SIXTEENTHS = st.integers(-20, 20).map(lambda k: k / 16)
TOKEN = st.tuples(SIXTEENTHS, SIXTEENTHS, st.booleans())
SEQUENCES = st.lists(st.lists(TOKEN, min_size=1, max_size=7), min_size=1, max_size=6)


def ratios_by_hand(kind: str, sequence: Sequence) -> list[float]:
    """The ratio of each scored token."""
    single = [math.exp(old - rollout) for old, rollout, scored in sequence if scored]
    if kind.startswith("sequence"):
        return [math.prod(single)] * len(single)
    if kind.startswith("geometric"):
        return [math.prod(single) ** (1 / len(single))] * len(single) if single else []
    return single


def weight_by_hand(kind: str, ratio: float) -> float:
    if kind.endswith("tis"):
        return ratio if ratio < HIGH else HIGH
    if ratio < LOW or ratio > HIGH:
        return 0.0
    return ratio if kind == "icepop" else 1.0


def by_hand(kind: str, sequences: list[Sequence]) -> list[tuple[float, float, float]]:
    """(weight, below, above) of every token."""
    expected = []
    for sequence in sequences:
        ratios = iter(ratios_by_hand(kind, sequence))
        for _, _, scored in sequence:
            if scored:
                ratio = next(ratios)
                expected.append((weight_by_hand(kind, ratio), float(ratio < LOW), float(ratio > HIGH)))
            else:
                expected.append((0.0, 0.0, 0.0))
    return expected


def columns(sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """old, rollout, mask, sequence ids; NaN outside the mask."""
    tokens = [token for sequence in sequences for token in sequence]
    old, rollout = (torch.tensor([t[i] if t[2] else math.nan for t in tokens]) for i in (0, 1))
    ids = torch.repeat_interleave(torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64))
    return old, rollout, torch.tensor([t[2] for t in tokens], dtype=torch.bool), ids


def table(kind: str, sequences: list[Sequence]) -> Tensor:
    """(tokens, 3): weight, below, above."""
    weights, metrics = correct(kind, *columns(sequences), LOW, HIGH)
    assert weights.dtype == torch.float32 and list(metrics) == ["correction_below", "correction_above"]
    return torch.stack([weights, *metrics.values()], 1)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(SEQUENCES)
def test_correct_of_each_kind_equals_loops(kind, sequences):
    expected = torch.tensor(by_hand(kind, sequences))
    torch.testing.assert_close(table(kind, sequences), expected, rtol=2e-6, atol=0)


def test_every_rule_by_hand():
    logs = [[0.0, math.log(2), math.log(0.5)], [math.log(1.5)], [math.log(0.5), math.log(0.5)]]
    sequences = [[(log - 3, -3.0, True) for log in sequence] for sequence in logs]
    expected = {
        "token-tis": [1, 1.6, 0.5, 1.5, 0.5, 0.5],
        "sequence-tis": [1, 1, 1, 1.5, 0.25, 0.25],
        "geometric-tis": [1, 1, 1, 1.5, 0.5, 0.5],
        "icepop": [1, 0, 0, 1.5, 0, 0],
        "token-rejection": [1, 0, 0, 1, 0, 0],
        "sequence-rejection": [1, 1, 1, 1, 0, 0],
        "geometric-rejection": [1, 1, 1, 1, 0, 0],
    }
    assert tuple(expected) == KINDS
    for kind, weights in expected.items():
        assert table(kind, sequences)[:, 0].tolist() == pytest.approx(weights, rel=1e-6), kind


def random_sequences() -> list[Sequence]:
    """Odd lengths, one scored token, none."""
    generator = torch.Generator().manual_seed(5)
    sequences = []
    for length in (5, 1, 7, 3, 13, 2):
        old, rollout, chance = torch.rand((3, length), generator=generator).tolist()
        scored = [length != 3 and (c < 0.7 or length == 1) for c in chance]
        sequences.append(list(zip(old, rollout, scored, strict=True)))
    return sequences


@pytest.mark.parametrize("kind", KINDS)
def test_order_and_split_of_whole_rows_change_no_bit(kind):
    sequences = random_sequences()
    alone = [table(kind, [sequence]) for sequence in sequences]
    order = [4, 0, 3, 5, 2, 1]
    assert torch.equal(table(kind, sequences), torch.cat(alone))
    assert torch.equal(table(kind, [sequences[i] for i in order]), torch.cat([alone[i] for i in order]))
    parts = [table(kind, sequences[start:stop]) for start, stop in ((0, 1), (1, 4), (4, 6))]
    assert torch.equal(torch.cat(parts), torch.cat(alone))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_log_probs_leave_everything_as_it_is(kind):
    sequences = [[(old, old, scored) for old, _, scored in sequence] for sequence in random_sequences()]
    found, mask = table(kind, sequences), columns(sequences)[2]
    assert torch.equal(found[:, 0], mask.float()) and not found[:, 1:].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_ratios_stay_finite(kind, sign):
    sequence = [(50.0 * sign, 0.0, True)] * 41
    found = table(kind, [sequence, [(0.0, 0.0, True)]])
    assert found.isfinite().all()
    weight = HIGH if kind.endswith("tis") and sign > 0 else 0.0
    assert found[:41, 0].tolist() == pytest.approx([weight] * 41, rel=1e-6, abs=1e-20)
    assert found[:, 1 if sign < 0 else 2].tolist() == [1.0] * 41 + [0.0]
    assert found[41, 0] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_correct_without_scored_tokens_is_empty_or_zero(kind):
    assert table(kind, [[(0.0, 5.0, False)] * 3, [(1.0, -1.0, False)]]).tolist() == [[0.0] * 3] * 4
    empty = torch.empty(0)
    weights, metrics = correct(kind, empty, empty, empty.bool(), empty.long(), LOW, HIGH)
    assert all(column.shape == (0,) for column in (weights, *metrics.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_flows_through_the_loss_and_not_through_the_weights(kind):
    logprobs, old, rollout = (torch.tensor(c, requires_grad=True) for c in ([-1.0, -2], [-1.2, -2.1], [-1.3, -1.9]))
    mask, ids, advantages = torch.tensor([True, True]), torch.tensor([0, 0]), torch.tensor([0.7, -0.4])
    weights, metrics = correct(kind, old, rollout, mask, ids, LOW, HIGH)
    assert not any(column.requires_grad for column in (weights, *metrics.values()))
    loss, _ = clipped_policy_loss(logprobs, old, advantages, mask, 0.9, 9.0)
    (loss * weights).sum().backward()
    assert old.grad is None and rollout.grad is None
    expected = -(logprobs - old).exp() * advantages * weights
    assert logprobs.grad.abs().min() > 0
    torch.testing.assert_close(logprobs.grad, expected.detach())


def test_correct_with_invalid_arguments_raises():
    column = torch.zeros(1)
    with pytest.raises(UserError, match="'tis' is unknown. Write one of token-tis, sequence-tis, "):
        correct("tis", column, column, column.bool(), column.long(), LOW, HIGH)
    for low, high in ((-0.1, 2.0), (1.1, 2.0), (0.5, 0.9), (0.5, math.inf), (math.nan, 2.0), (0.5, math.nan)):
        with pytest.raises(UserError, match="Write bounds such as"):
            correct("icepop", column, column, column.bool(), column.long(), low, high)


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


def test_drifted_sequences_are_those_that_became_less_probable():
    new = torch.tensor([-3.0, -3.0, -1.0, -1.0], requires_grad=True)
    rollout, ids = torch.tensor([-1.0, -1.0, -3.0, -3.0]), torch.tensor([0, 0, 1, 1])
    mask, negative = torch.ones(4, dtype=torch.bool), -torch.ones(4)
    found = drifted_sequences(new, rollout, negative, mask, ids, 0.5)
    assert found.tolist() == [True, True, False, False] and not found.requires_grad
    assert not drifted_sequences(new, rollout, -negative, mask, ids, 0.5).any()
    with pytest.raises(UserError, match="opsm_delta is 0"):
        drifted_sequences(new, rollout, negative, mask, ids, 0.0)
