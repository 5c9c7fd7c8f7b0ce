"""Every loss: the same value and gradient under any split of the rows into ranks and micro-batches, and any order."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithms.losses.cases import HELPERS, LOSSES, MAX_LENGTH, PAIRS, ROWS, Case, add_choices, batch, pack
from verl_mg.algorithms import losses
from verl_mg.algorithms.aggregation import MODES, aggregate, normalizer


def test_losses_of_the_table_are_all_that_are_exported():
    assert {name.split(",")[0] for name in LOSSES} == set(losses.__all__) - HELPERS - {"Metrics"}


def run(
    case: Case, mode: str, split: Sequence[Sequence[int]], dtype: torch.dtype, outside: float = torch.nan
) -> tuple[float, list[Tensor]]:
    """The sum over micro-batches, and the gradient by the log-probs of each row; outside the mask both are silent."""
    rows = batch(dtype, outside)
    scored = [int(row[case.mask].sum()) for row in rows]
    divisor = normalizer(mode, sum(scored), sum(count > 0 for count in scored), MAX_LENGTH)
    parts = [pack([rows[row] for row in numbers]) for numbers in split]
    add_choices(parts)
    value, gradients = 0.0, [torch.empty(0)] * ROWS
    for part, numbers in zip(parts, split, strict=True):
        leaf = part["logprobs"] = part["logprobs"].requires_grad_()
        loss, metrics = case.call(part)
        total = aggregate(loss, part[case.mask], part["sequence_ids"], mode, divisor)
        total.backward()
        for column in (loss, leaf.grad, *metrics.values()):
            assert column.shape == leaf.shape and column.dtype == dtype
            assert column.isfinite().all() and not column[~part[case.mask]].any()
        assert not any(metric.requires_grad for metric in metrics.values())
        value += total.item()
        for row, gradient in zip(numbers, leaf.grad.split([len(rows[row]["mask"]) for row in numbers]), strict=True):
            gradients[row] = gradient
    return value, gradients


def splits(case: Case) -> list[list[list[int]]]:
    """Micro-batches: one a unit; two ranks of two; all in another order; uneven ones in another order."""
    shuffled = [case.units[i] for i in torch.randperm(len(case.units), generator=torch.Generator().manual_seed(2))]
    mixed = [row for unit in shuffled for row in reversed(unit)]
    at = [0, 1, len(shuffled) // 2, len(shuffled)]
    return [
        [list(unit) for unit in case.units],
        [[row for unit in case.units[rank::2][half::2] for row in unit] for rank in (0, 1) for half in (0, 1)],
        [mixed],
        [[row for unit in shuffled[start:stop] for row in unit] for start, stop in pairwise(at)],
    ]


TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-5}


def check(case: Case, mode: str, split: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
    value, gradients = run(case, mode, [list(range(ROWS))], dtype)
    scale = max(float(gradient.abs().max()) for gradient in gradients)
    assert abs(value) > 1e-4 and sum(bool(gradient.any()) for gradient in gradients) >= 8
    found, by_row = run(case, mode, split, dtype)
    assert found == pytest.approx(value, rel=TOLERANCES[dtype])
    for gradient, expected in zip(by_row, gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * scale)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_any_split_and_order_is_the_same(name, mode, dtype):
    for split in splits(LOSSES[name]):
        check(LOSSES[name], mode, split, dtype)


@settings(max_examples=40)
@given(st.sampled_from(sorted(LOSSES)), st.permutations(range(6)), st.lists(st.integers(0, 6), max_size=3))
def test_losses_of_random_splits_add_up_to_the_whole(name, order, cuts):
    units = [PAIRS[i] for i in order]
    at = [0, *sorted({cut for cut in cuts if 0 < cut < 6}), 6]
    parts = [[row for unit in units[start:stop] for row in unit] for start, stop in pairwise(at)]
    check(LOSSES[name], "seq-mean-token-mean", parts, torch.float64)


@pytest.mark.parametrize("outside", [torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("name", LOSSES)
def test_garbage_outside_the_mask_reaches_no_loss(name, outside):
    arguments = (LOSSES[name], "token-mean", [list(range(ROWS))], torch.float64)
    value, gradients = run(*arguments)
    found, by_row = run(*arguments, outside)
    assert found == value and all(map(torch.equal, by_row, gradients))


@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_a_micro_batch_without_tokens_has_no_values(name):
    part = {column: values[:0] for column, values in pack(batch(torch.float32)).items()}
    part |= {"cut": part["mask"], "penalized": part["mask"], "logprobs": part["logprobs"].requires_grad_()}
    loss, _ = LOSSES[name].call(part)
    assert loss.shape == (0,)
    loss.sum().backward()
