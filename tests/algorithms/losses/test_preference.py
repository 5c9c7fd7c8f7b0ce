"""Pair and outcome losses against scalar formulas, their gradients against finite differences."""

import math

import pytest
import torch
from torch import Tensor

from verl_mg.algorithms.aggregation import aggregate
from verl_mg.algorithms.losses import bradley_terry_loss, dpo_loss, prime_loss
from verl_mg.algorithms.losses.preference import DPO_KINDS
from verl_mg.errors import UserError

BETA = 0.4
# (pair, chosen, log pi - log ref of each token or None where the token is not scored); rows in no order
ROWS: list[tuple[int, bool, list[float | None]]] = [
    (7, True, [0.3, None, 0.9, -0.2]),
    (-2, False, [0.4, 0.5]),
    (7, False, [-0.6, -0.3, None]),
    (-2, True, [None, -0.8]),
    (5, False, [2.0, 1.0]),
    (5, True, [4.0]),
]
PAIRS = (7, -2, 5)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def columns() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logprobs, ref_logprobs, mask, pair, chosen, sequence_ids."""
    flat = [(d, pair, chosen, i) for i, (pair, chosen, row) in enumerate(ROWS) for d in row]
    ref = torch.linspace(-4, -1, len(flat), dtype=torch.float64)
    difference = torch.tensor([math.nan if d is None else d for d, *_ in flat], dtype=torch.float64)
    pair, chosen, ids = (torch.tensor([entry[i] for entry in flat]) for i in (1, 2, 3))
    return (ref + difference).requires_grad_(), ref, ~difference.isnan(), pair, chosen, ids


def sums(moved: int = -1, step: float = 0.0) -> list[float]:
    """The log-ratio of each row, with the token of the flat index `moved` moved by `step`."""
    found, token = [], 0
    for _, _, row in ROWS:
        found.append(0.0)
        for d in row:
            found[-1] += 0.0 if d is None else d + step * (token == moved)
            token += 1
    return found


def dpo_by_hand(rows: list[float], kind: str, smoothing: float) -> list[float]:
    """The loss of each pair."""
    found = []
    for number in PAIRS:
        mine = {chosen: total for (pair, chosen, _), total in zip(ROWS, rows, strict=True) if pair == number}
        h = mine[True] - mine[False]
        if kind == "sigmoid":
            loss = -(1 - smoothing) * math.log(sigmoid(BETA * h)) - smoothing * math.log(sigmoid(-BETA * h))
        else:
            loss = max(0.0, 1 - BETA * h) if kind == "hinge" else (h - 1 / (2 * BETA)) ** 2
        found.append(loss)
    return found


@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("hinge", 0.0), ("ipo", 0.0)])
def test_dpo_loss_of_each_kind_equals_the_formula(kind, smoothing):
    new, ref, mask, pair, chosen, ids = columns()
    loss, metrics = dpo_loss(new, ref, mask, pair, chosen, BETA, smoothing, kind)
    expected = dict(zip(PAIRS, dpo_by_hand(sums(), kind, smoothing), strict=True))
    for token, number in enumerate(pair.tolist()):
        assert loss[token].item() == pytest.approx(expected[number] if mask[token] else 0.0, rel=1e-12)

    # Six rows, three pairs: the mean over rows is that over pairs.
    total = aggregate(loss, mask, ids, "seq-mean-token-mean", float(len(ROWS)))
    assert total.item() == pytest.approx(sum(expected.values()) / 3, rel=1e-12)
    total.backward()
    assert (new.grad != 0).sum() >= 8
    for token in range(len(pair)):
        ends = [sum(dpo_by_hand(sums(token, step), kind, smoothing)) / 3 for step in (1e-6, -1e-6)]
        assert new.grad[token].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6, abs=1e-8)

    first = {name: column[0].item() for name, column in metrics.items()}
    assert first == pytest.approx(
        {"accuracy": 1, "chosen_reward": BETA * 1.0, "rejected_reward": -BETA * 0.9, "margin": BETA * 1.9}
    )
    assert metrics["accuracy"][pair == -2].sum() == 0


def test_bradley_terry_loss_of_pairs_equals_the_formula():
    scores = torch.tensor([1.5, math.nan, -0.5, math.nan, 2.0, 0.25], requires_grad=True)
    mask = ~scores.isnan()
    pair, chosen = torch.tensor([3, 3, 3, 8, 8, 8]), torch.tensor([True, True, False, False, False, True])
    loss, metrics = bradley_terry_loss(scores, mask, pair, chosen)
    aggregate(loss, mask, torch.tensor([0, 0, 1, 2, 2, 3]), "seq-mean-token-mean", 4.0).backward()
    losses = [-math.log(sigmoid(2.0)), -math.log(sigmoid(-1.75))]
    assert loss.tolist() == pytest.approx([losses[0], 0, losses[0], 0, losses[1], losses[1]], rel=1e-6)
    slopes = [sigmoid(-2.0) / 2, sigmoid(1.75) / 2]
    assert scores.grad.tolist() == pytest.approx([-slopes[0], 0, slopes[0], 0, slopes[1], -slopes[1]], rel=1e-5)
    assert metrics["accuracy"].tolist() == [1, 0, 1, 0, 0, 0]
    assert metrics["margin"].tolist() == [2.0, 0, 2.0, 0, -1.75, -1.75]
    assert metrics["rejected_reward"].tolist() == [-0.5, 0, -0.5, 0, 2.0, 2.0]


def test_prime_loss_of_sequences_equals_the_formula():
    new, ref, mask, _, _, ids = columns()
    labels = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    loss, metrics = prime_loss(new, ref, mask, ids, torch.tensor(labels, dtype=torch.float64)[ids], BETA)
    aggregate(loss, mask, ids, "seq-mean-token-mean", 1.0).backward()
    rewards = [BETA * total for total in sums()]
    for token, row in enumerate(ids.tolist()):
        chance = sigmoid(rewards[row])
        expected = -math.log(chance if labels[row] else 1 - chance)
        assert loss[token].item() == pytest.approx(expected * bool(mask[token]), rel=1e-12)
        assert new.grad[token].item() == pytest.approx(BETA * (chance - labels[row]) * bool(mask[token]), rel=1e-9)
        assert metrics["accuracy"][token] == (bool(mask[token]) and (rewards[row] > 0) == (labels[row] == 1))
        assert metrics["implicit_reward"][token].item() == pytest.approx(rewards[row] * bool(mask[token]))


def test_margins_far_out_stay_finite():
    pair, chosen, mask = torch.zeros(2).long(), torch.tensor([True, False]), torch.ones(2, dtype=torch.bool)
    new = torch.tensor([-1e4, 0.0], requires_grad=True)
    loss, _ = dpo_loss(new, torch.zeros(2), mask, pair, chosen, 1.0)
    loss.sum().backward()
    assert loss.tolist() == [1e4, 1e4] and new.grad is not None and new.grad.tolist() == [-2.0, 2.0]


def test_preference_losses_with_invalid_arguments_raise():
    new, ref, mask, pair, chosen, ids = columns()
    for options, message in [
        ({"kind": "dpo"}, f"'dpo' is unknown. Write one of {', '.join(DPO_KINDS)}"),
        ({"beta": 0.0}, "beta is 0.0"),
        ({"label_smoothing": 0.5}, "label_smoothing is 0.5"),
        ({"label_smoothing": 0.1, "kind": "ipo"}, "label_smoothing is 0.1"),
    ]:
        with pytest.raises(UserError, match=message):
            dpo_loss(new, ref, mask, pair, chosen, **{"beta": 0.1} | options)
    with pytest.raises(UserError, match="beta is -1"):
        prime_loss(new, ref, mask, ids, torch.zeros_like(new), -1.0)


def test_a_pair_cut_in_two_is_an_error():
    new, ref, mask, pair, chosen, _ = columns()
    with pytest.raises(UserError, match="pair 5: a row is in another micro-batch"):
        dpo_loss(new, ref, mask & ((pair != 5) | ~chosen), pair, chosen, BETA)
    with pytest.raises(UserError, match="pair 7: a row is in another micro-batch"):
        bradley_terry_loss(new, mask, pair, chosen | (pair == 7))
