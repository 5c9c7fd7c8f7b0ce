"""Rows carried between ranks and columns carried back, against a shuffle done by hand."""

import pytest
import torch
import torch.distributed as dist

from verl_mg.batch import Batch, ColumnKind
from verl_mg.roles.row_dispatch import build_row_index, gather_rows, scatter_column


def rows_held_by(rank: int) -> Batch:
    """Rank 1 holds nothing; the others hold rows whose every entry tells their sample id."""
    ids = {0: [5, 3], 1: [], 2: [0, 7, 2]}[rank]
    batch = Batch([i + 2 for i in ids])
    batch["sample_id"] = torch.tensor(ids, dtype=torch.int64)
    batch["tokens"] = batch.positions + 10 * batch.expand_to_tokens(batch["sample_id"])
    batch["loss_mask"] = batch.positions > 1
    batch["mine"] = (batch.expand_to_tokens(batch["sample_id"])[:, None] * torch.tensor([1.0, -0.5])).to(torch.float16)
    batch["reward"] = batch["sample_id"] / 4
    return batch


def there_and_back(wanted):
    batch = rows_held_by(dist.get_rank())
    index = build_row_index(batch)
    fetched = gather_rows(batch, index, wanted)
    speakers = list(enumerate(wanted))
    values = {row: fetched.row("tokens", i).float() * 2 for i, row in enumerate(wanted[dist.get_rank()])}
    back = scatter_column("doubled", batch, index, speakers, values)
    assert torch.equal(back, batch["tokens"].float() * 2)
    return index.lengths, index.judged, fetched


def test_rows_arrive_whole_and_in_order_and_columns_return(ranks):
    # Rows are numbered by sample id: 0, 2, 3, 5, 7 are rows 0 to 4.
    wanted = [[4, 0], [1], [3, 2]]
    for rank, (lengths, judged, fetched) in enumerate(ranks.run(3, there_and_back, wanted)):
        assert lengths == (2, 4, 5, 7, 9) and judged == (0, 2, 3, 5, 7)
        ids = [[0, 2, 3, 5, 7][row] for row in wanted[rank]]
        assert fetched["sample_id"].tolist() == ids
        for i, sample_id in enumerate(ids):
            assert fetched.row("tokens", i).tolist() == [10 * sample_id + t for t in range(sample_id + 2)]
            assert fetched.row("mine", i).tolist() == [[sample_id, -sample_id / 2]] * (sample_id + 2)
        assert fetched["reward"].tolist() == [i / 4 for i in ids]
        assert fetched["mine"].dtype is torch.float16 and fetched["loss_mask"].dtype is torch.bool
        assert fetched.kind("mine") is ColumnKind.TOKEN


def replicated():
    """Two ranks take the same rows, as the ranks of one tensor-parallel group do."""
    batch = rows_held_by(2 * dist.get_rank())
    index = build_row_index(batch)
    fetched = gather_rows(batch, index, [[0, 1, 2, 3, 4]] * 2)
    values = {row: torch.full((index.lengths[row],), float(row)) for row in range(5)} if dist.get_rank() == 1 else {}
    return fetched["sample_id"].tolist(), scatter_column("x", batch, index, [(1, range(5))], values).tolist()


def test_several_ranks_may_take_a_row_and_one_answers(ranks):
    (first, own), (second, other) = ranks.run(2, replicated)
    assert first == second == [0, 2, 3, 5, 7]
    assert own == [3.0] * 7 + [2.0] * 5
    assert other == [0.0] * 2 + [4.0] * 9 + [1.0] * 4


def with_equal_ids():
    return build_row_index(rows_held_by(0))


def test_equal_sample_ids_are_refused(ranks):
    with pytest.raises(AssertionError, match="two rows of the batch have the same sample_id"):
        ranks.run(2, with_equal_ids)
