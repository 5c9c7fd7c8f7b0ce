"""GSPO and GMPO against scalar formulas of whole sequences; their gradients against finite differences."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_mg.algorithms.aggregation import aggregate
from verl_mg.algorithms.losses import gmpo_loss, gspo_loss

LOW, HIGH = 0.2, 0.3
DUALS = [None, 1.4]
TOKEN = st.tuples(st.floats(-0.8, 0.8), st.booleans())
SEQUENCE = st.tuples(st.floats(-2, 2), st.lists(TOKEN, min_size=1, max_size=5))
Sequences = list[tuple[float, list[tuple[float, bool]]]]


def gspo_by_hand(advantage: float, differences: list[float], dual: float | None) -> float:
    """Equation 5 of arXiv:2507.18071 for one sequence, negated; the dual clip as in arXiv:1912.09729."""
    ratio = math.exp(sum(differences) / len(differences))
    if dual is not None and advantage < 0:
        ratio = min(ratio, dual)
    return -min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)


def gmpo_by_hand(advantage: float, differences: list[float], dual: float | None) -> float:
    """The objective of arXiv:2507.20673 for one sequence, negated: a product of ratios under a root."""
    product = 1.0
    for difference in differences:
        ratio, sign = math.exp(difference), 1 if advantage > 0 else -1
        clipped = min(max(ratio, math.exp(-LOW)), math.exp(HIGH))
        kept = sign * min(sign * ratio, sign * clipped)
        product *= min(kept, dual) if dual is not None and sign < 0 else kept
    return -advantage * product ** (1 / len(differences))


def columns(sequences: Sequences) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logprobs, old_logprobs, advantages, mask, sequence_ids; NaN outside the mask."""
    flat = [(d, counts, a, i) for i, (a, tokens) in enumerate(sequences) for d, counts in tokens]
    mask = torch.tensor([counts for _, counts, _, _ in flat])
    old = torch.where(mask, torch.linspace(-3, -1, len(flat), dtype=torch.float64), torch.nan)
    new = old + torch.tensor([d for d, _, _, _ in flat], dtype=torch.float64)
    advantages = torch.tensor([a for _, _, a, _ in flat], dtype=torch.float64)
    return new.requires_grad_(), old, advantages, mask, torch.tensor([i for _, _, _, i in flat])


CASES = {"gspo": (gspo_loss, gspo_by_hand), "gmpo": (gmpo_loss, gmpo_by_hand)}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=150)
@given(st.lists(SEQUENCE, min_size=1, max_size=4), st.sampled_from(DUALS))
def test_value_against_the_paper(name, sequences, dual):
    function, by_hand = CASES[name]
    new, old, advantages, mask, ids = columns(sequences)
    loss, metrics = function(new, old, advantages, mask, ids, LOW, HIGH, dual)
    kept = [(a, [d for d, counts in tokens if counts]) for a, tokens in sequences]
    expected = [by_hand(a, differences, dual) if differences else 0.0 for a, differences in kept]
    for token, sequence in enumerate(ids.tolist()):
        wanted = expected[sequence] if mask[token] else 0.0
        assert loss[token].item() == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    total = aggregate(loss, mask, ids, "seq-mean-token-mean", 1.0)
    assert total.item() == pytest.approx(sum(expected), rel=1e-9, abs=1e-12)
    assert all(column.isfinite().all() for column in metrics.values())


@pytest.mark.parametrize("dual", DUALS)
@pytest.mark.parametrize("name", CASES)
def test_gradient_is_that_of_the_paper(name, dual):
    function, by_hand = CASES[name]
    sequences: Sequences = [
        (1.3, [(0.05, True), (0.4, True), (-0.3, False), (-0.5, True)]),
        (-0.7, [(0.1, True), (-0.4, True), (0.35, True)]),
        (1.0, [(0.9, True), (0.8, True)]),  # beyond the clip of either
        (-2.0, [(0.02, True)]),
        (-1.0, [(0.7, True), (0.6, True)]),  # beyond the dual clip of either
    ]
    new, old, advantages, mask, ids = columns(sequences)
    loss, _ = function(new, old, advantages, mask, ids, LOW, HIGH, dual)
    aggregate(loss, mask, ids, "seq-mean-token-mean", 1.0).backward()
    token, step, slopes = 0, 1e-6, []
    for advantage, tokens in sequences:
        for place in range(len(tokens)):
            ends = []
            for sign in (1, -1):
                moved = [d + sign * step * (i == place) for i, (d, _) in enumerate(tokens)]
                kept = [d for d, (_, counts) in zip(moved, tokens, strict=True) if counts]
                ends.append(by_hand(advantage, kept, dual))
            slopes.append((ends[0] - ends[1]) / (2 * step))
            assert new.grad[token].item() == pytest.approx(slopes[-1], rel=1e-6, abs=1e-8)
            token += 1
    assert sum(slope != 0 for slope in slopes) >= 4 and sum(slope == 0 for slope in slopes) >= 3
    assert (slopes[-1] == 0) == (dual is not None)


def test_gspo_takes_advantages_by_token():
    new, old, _, mask, ids = columns([(0.0, [(0.1, True), (0.2, True), (-0.1, True)])])
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    gspo_loss(new, old, advantages, mask, ids, LOW, HIGH)[0].sum().backward()
    ratio = math.exp(0.2 / 3)
    assert new.grad.tolist() == pytest.approx([-ratio, 2 * ratio, -0.5 * ratio])


def clipped_tokens(function: Callable[..., tuple[Tensor, dict[str, Tensor]]]) -> list[list[float]]:
    tokens = [(0.5, True), (0.1, True), (-0.5, True)]
    new, old, advantages, mask, ids = columns([(1.0, tokens), (-1.0, tokens), (1.0, [(0.9, True)])])
    metrics = function(new, old, advantages, mask, ids, LOW, HIGH)[1]
    return [metrics[f"clip_fraction_{end}"].tolist() for end in ("low", "high")]


def test_sequence_losses_at_the_clips_report_clip_fractions():
    assert clipped_tokens(gspo_loss) == [[0] * 7, [0] * 6 + [1]]
    assert clipped_tokens(gmpo_loss) == [[0, 0, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 1]]
