"""Aggregation against loops over sequences, and the same loss and gradient under any split of the batch."""

import pytest
import torch
from torch import Tensor

from verl_mg.algorithms.aggregation import MODES, aggregate, normalizer
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
    assert loss.grad is not None
    return total.item(), loss.grad


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
def test_any_split_gives_the_loss_of_the_batch(mode: str, split: str) -> None:
    value, gradient = value_and_gradient(mode, splits()[split])
    expected, weights = by_hand(mode)
    assert abs(expected) > 1e-3
    assert value == pytest.approx(expected, rel=1e-12)
    assert (gradient != 0).sum() == batch()[1].sum()
    torch.testing.assert_close(gradient, torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_trajectories_with_rows_in_several_micro_batches_are_one_sequence_each(mode: str, seed: int) -> None:
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
    expected, weights = by_hand(mode)
    assert loss.grad is not None and abs(expected) > 1e-3 and (loss.grad != 0).sum() == mask.sum()
    assert total.item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(loss.grad, torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_mask_is_zero_with_a_gradient(mode: str) -> None:
    loss = torch.full((3,), torch.nan, requires_grad=True)
    ids = torch.zeros(3, dtype=torch.int64)
    total = aggregate(loss, torch.zeros(3, dtype=torch.bool), ids, mode, normalizer(mode, 0, 0, MAX_LENGTH))
    total.backward()
    assert total.item() == 0.0
    assert loss.grad is not None and loss.grad.tolist() == [0.0, 0.0, 0.0]


def test_normalizer_of_each_mode_is_the_documented_count() -> None:
    assert [normalizer(mode, 100, 8, 32) for mode in MODES] == [100.0, 8.0, 8.0, 256.0]


def test_aggregation_with_invalid_arguments_raises() -> None:
    column = torch.zeros(1)
    for call in (
        lambda: normalizer("mean", 1, 1, None),
        lambda: aggregate(column, column.bool(), column.long(), "mean", 1.0),
    ):
        with pytest.raises(UserError, match="'mean' is unknown. Write one of token-mean, seq-mean-token-sum, "):
            call()
    with pytest.raises(UserError, match="max_length is None"):
        normalizer("seq-mean-token-sum-norm", 1, 1, None)
