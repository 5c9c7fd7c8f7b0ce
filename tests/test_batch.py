"""`Batch` against plain Python lists of rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_mg.batch import Batch, ColumnKind
from verl_mg.images import Image

rows_of_tokens = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=0, max_size=6)


def batch_of(rows: list[list[int]]) -> Batch:
    batch = Batch.from_rows(rows)
    batch["sample_id"] = torch.arange(len(rows))
    batch["values"] = torch.tensor([float(t) + 0.5 for row in rows for t in row])
    flat = [t for row in rows for t in row]
    batch["support_ids"] = torch.tensor([i for t in flat for i in own(t)], dtype=torch.int32)  # in either order
    batch["support_sizes"] = torch.tensor([len(own(t)) for t in flat], dtype=torch.int32)
    batch["selection_sizes"] = torch.tensor([t % 2 for t in flat], dtype=torch.int32)
    batch["selected_keys"] = torch.tensor([t for t in flat if t % 2], dtype=torch.uint8)[:, None]
    return batch


def own(token: int) -> list[int]:
    """The candidates of a token: none to two."""
    return [token, token + 100][: token % 3]


def as_rows(batch: Batch) -> list[list[int]]:
    return [batch.row("tokens", i).tolist() for i in range(len(batch))]


@given(rows_of_tokens, st.data())
def test_select_takes_rows_in_the_given_order(rows, data):
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    chosen = batch_of(rows).select(order)
    assert as_rows(chosen) == [rows[i] for i in order]
    assert chosen["sample_id"].tolist() == order
    assert chosen["values"].tolist() == [t + 0.5 for i in order for t in rows[i]]
    assert chosen["support_ids"].tolist() == [i for row in order for t in rows[row] for i in own(t)]
    assert chosen["selected_keys"].tolist() == [[t] for row in order for t in rows[row] if t % 2]
    assert chosen.counts(ColumnKind.CANDIDATE).tolist() == [sum(len(own(t)) for t in rows[i]) for i in order]


@given(rows_of_tokens, st.integers(0, 6))
def test_split_and_concat_undo_each_other(rows, first):
    first = min(first, len(rows))
    batch = batch_of(rows)
    again = Batch.concat(batch.split([first, len(rows) - first]))
    assert as_rows(again) == rows
    assert torch.equal(again["values"], batch["values"])
    assert torch.equal(again["support_ids"], batch["support_ids"])
    assert torch.equal(again["selected_keys"], batch["selected_keys"])
    assert again.kind("support_ids") is ColumnKind.CANDIDATE and again.kind("selected_keys") is ColumnKind.SELECTION


@given(rows_of_tokens)
def test_positions_ids_spread_and_padding(rows):
    batch = batch_of(rows)
    assert batch.positions.tolist() == [i for row in rows for i in range(len(row))]
    assert batch.sequence_ids.tolist() == [n for n, row in enumerate(rows) for _ in row]
    assert batch.expand_to_tokens(batch["sample_id"]).tolist() == [n for n, row in enumerate(rows) for _ in row]
    table, mask = batch.pad("tokens", fill=-1)
    width = max((len(row) for row in rows), default=0)
    assert table.tolist() == [row + [-1] * (width - len(row)) for row in rows]
    assert mask.tolist() == [[True] * len(row) + [False] * (width - len(row)) for row in rows]


def test_repeat_puts_copies_side_by_side():
    assert as_rows(batch_of([[1, 2], [3]]).repeat(2)) == [[1, 2], [1, 2], [3], [3]]


def test_select_by_mask():
    assert as_rows(batch_of([[1], [2, 3], [4]]).select(torch.tensor([True, False, True]))) == [[1], [4]]


def test_a_column_of_the_wrong_size_is_refused():
    batch = batch_of([[1, 2], [3]])
    with pytest.raises(ValueError, match="'reward' has shape"):
        batch["reward"] = torch.zeros(3)
    with pytest.raises(ValueError, match="'values' has shape"):
        batch["values"] = torch.zeros(2)
    with pytest.raises(ValueError, match="'support_ids' has shape"):  # the tokens 1, 2 and 3 have three together
        batch["support_ids"] = torch.zeros(4)
    with pytest.raises(ValueError, match="'support_sizes' adds up to 1, but 'support_ids' has 3"):
        batch["support_sizes"] = torch.tensor([1, 0, 0])
    with pytest.raises(ValueError, match="'selection_sizes' adds up to 1, but 'selected_keys' has 2"):
        batch["selection_sizes"] = torch.tensor([1, 0, 0])
    with pytest.raises(
        KeyError, match="no column 'advantage'; it has sample_id, selected_keys, selection_sizes, support"
    ):
        batch["advantage"]


def test_unlisted_columns_take_the_kind_that_fits():
    batch = batch_of([[1, 2], [3]])
    batch["mine"], batch["ours"] = torch.zeros(3, 4), torch.zeros(2)
    assert (batch.kind("mine"), batch.kind("ours")) == (ColumnKind.TOKEN, ColumnKind.SEQUENCE)
    assert batch.select([1])["mine"].shape == (1, 4)


def test_an_empty_batch_joins_any_other():
    whole = Batch.concat([batch_of([]), batch_of([[1, 2]])])
    assert as_rows(whole) == [[1, 2]]
    assert whole.kind("values") is ColumnKind.TOKEN


def test_images_stay_with_their_rows_and_are_never_copied():
    batch, picture, other = batch_of([[1], [2, 3], [4]]), Image(b"a"), Image(b"b")
    batch.images = [(picture,), (), (picture, other)]
    assert batch.select([2, 0]).images == [(picture, other), (picture,)] and batch.split([1, 2])[1].images[0] == ()
    assert batch.select_columns(["tokens"]).images is batch.images
    assert batch.repeat(2).images[4][0] is batch.repeat(2).images[1][0] is picture
    assert Batch.concat([batch_of([[5]]), batch]).images == [(), *batch.images]
    assert batch_of([[1]]).select([0]).images is Batch.concat([batch_of([[1]])]).images is None
    with pytest.raises(ValueError, match="images of 2 rows: the batch has 3"):
        batch.images = [(), ()]


def test_batches_with_different_columns_are_not_joined():
    other = batch_of([[1]])
    other["reward"] = torch.zeros(1)
    with pytest.raises(ValueError, match="different columns"):
        Batch.concat([batch_of([[1]]), other])
    with pytest.raises(ValueError, match="add up to 3, the batch has 1"):
        other.split([1, 2])


@given(rows_of_tokens, st.data())
def test_pad_of_trajectories_puts_their_rows_one_after_another(rows, data):
    numbers = [data.draw(st.integers(0, 3)) for _ in rows]
    batch = batch_of(rows)
    batch["trajectory"] = torch.tensor([50 - number for number in numbers], dtype=torch.int64)
    ids = data.draw(st.permutations(range(len(rows))))
    batch["sample_id"] = torch.tensor(ids, dtype=torch.int64)
    order = list(dict.fromkeys(numbers))
    members = [sorted((i for i in range(len(rows)) if numbers[i] == n), key=ids.__getitem__) for n in order]
    lines = [[token for i in rows_ for token in rows[i]] for rows_ in members]
    table, mask = batch.pad("tokens", fill=-1)
    width = max(map(len, lines), default=0)
    assert table.tolist() == [line + [-1] * (width - len(line)) for line in lines]
    assert mask.sum(1).tolist() == [len(line) for line in lines]
    assert torch.equal(batch.unpad(table), batch["tokens"])
    assert batch.trajectory_index.tolist() == [order.index(number) for number in numbers]
    assert batch.first_rows.tolist() == [rows_[0] for rows_ in members]
    assert batch.last_rows.tolist() == [rows_[-1] for rows_ in members]
    assert batch.one_per_trajectory()["sample_id"].tolist() == [ids[rows_[0]] for rows_ in members]
    assert not {"tokens", "support_ids"} & set(batch.one_per_trajectory().names())
