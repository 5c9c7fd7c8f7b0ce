"""Transfer of rows and columns between ranks, and the cached row index of a batch."""

import os
from collections import Counter
from itertools import accumulate
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from verl_mg.batch import Batch, ColumnKind
from verl_mg.data.prompts import Prompt
from verl_mg.distributed.collectives import all_gather_bytes
from verl_mg.images import Image
from verl_mg.rollout.groups import Group
from verl_mg.rollout.rollout import distribute_rows
from verl_mg.rows import dispatch as row_dispatch
from verl_mg.rows import plan as row_plan
from verl_mg.rows.dispatch import gather_rows, scatter_column
from verl_mg.rows.plan import ColumnPart, RowIndexer, plan_deliveries, plan_returns
from verl_mg.rows.samples import GeneratedRows


def rows_held_by(rank: int) -> Batch:
    """Rank 1 has no rows; the entries of the other rows are functions of their sample ids."""
    ids = {0: [5, 3], 1: [], 2: [0, 7, 2]}[rank]
    batch = Batch([i + 2 for i in ids])
    batch["sample_id"] = torch.tensor(ids, dtype=torch.int64)
    batch["tokens"] = batch.positions + 10 * batch.expand_to_tokens(batch["sample_id"])
    batch["loss_mask"] = batch.positions > 1
    batch["mine"] = (batch.expand_to_tokens(batch["sample_id"])[:, None] * torch.tensor([1.0, -0.5])).to(torch.float16)
    batch["reward"] = batch["sample_id"] / 4
    batch["support_sizes"] = (batch["tokens"] % 3).int()
    batch["support_ids"] = torch.tensor([t for token in batch["tokens"].tolist() for t in [token] * (token % 3)]).int()
    batch["selection_sizes"] = (batch["tokens"] % 2).int()
    batch["selected_keys"] = torch.tensor([[t, t + 1] for t in batch["tokens"].tolist() if t % 2]).view(-1, 2).byte()
    return batch


def gathered_and_scattered(wanted):
    batch = rows_held_by(dist.get_rank())
    index = RowIndexer().index(batch)
    fetched = gather_rows(batch, index, wanted)
    senders = list(enumerate(wanted))
    values = {row: fetched.row("tokens", i).float() * 2 for i, row in enumerate(wanted[dist.get_rank()])}
    back = scatter_column("doubled", index, senders, values)
    assert torch.equal(back, batch["tokens"].float() * 2)
    return index.lengths, index.num_scored_tokens, fetched


def test_gathered_rows_are_in_order_and_scattered_columns_reach_their_owners(ranks):
    # Rows are numbered by sample id: 0, 2, 3, 5, 7 are rows 0 to 4.
    wanted = [[4, 0], [1], [3, 2]]
    for rank, (lengths, scored, fetched) in enumerate(ranks.run(3, gathered_and_scattered, wanted)):
        assert lengths == (2, 4, 5, 7, 9) and scored == (0, 2, 3, 5, 7)
        ids = [[0, 2, 3, 5, 7][row] for row in wanted[rank]]
        assert fetched["sample_id"].tolist() == ids
        for i, sample_id in enumerate(ids):
            assert fetched.row("tokens", i).tolist() == [10 * sample_id + t for t in range(sample_id + 2)]
            assert fetched.row("mine", i).tolist() == [[sample_id, -sample_id / 2]] * (sample_id + 2)
        assert fetched["reward"].tolist() == [i / 4 for i in ids]
        flat = [10 * i + t for i in ids for t in range(i + 2)]
        assert fetched["support_ids"].tolist() == [token for token in flat for _ in range(token % 3)]
        assert fetched["selected_keys"].tolist() == [[token, token + 1] for token in flat if token % 2]
        assert fetched["mine"].dtype is torch.float16 and fetched["loss_mask"].dtype is torch.bool
        assert fetched.kind("mine") is ColumnKind.TOKEN


def links_of_prompts(images):
    """Links of rows 0 and 1 of rank 0, and 2 and 3 of rank 1: prompt 7 8 9, the last one's is 7 8 6."""
    rank = dist.get_rank()
    batch = Batch.from_rows([[7, 8, 9, 1], [7, 8, 9]] if rank == 0 else [[7, 8, 9, 2, 3], [7, 8, 6, 4]])
    batch["sample_id"] = 2 * rank + torch.arange(2)
    batch["prompt_length"], batch["loss_mask"] = torch.tensor([3, 3]), batch.positions > 2
    if images and rank == 1:
        batch.images = [(Image(b"a"),), (Image(b"b"),)]
    return RowIndexer().index(batch).links


@pytest.mark.parametrize(("images", "shared"), [(False, [0, 0, 3, 0]), (True, [0] * 4)])
def test_index_links_rows_of_a_prompt_on_all_ranks_unless_they_have_images(ranks, images, shared):
    first, second = ranks.run(2, links_of_prompts, images)
    assert first == second and first.shared == shared
    assert first.parents == [0, 1, 0 if shared[2] else 2, 3]


def replicated():
    """Two ranks take the same rows, as the ranks of one tensor-parallel group do."""
    batch = rows_held_by(2 * dist.get_rank())
    index = RowIndexer().index(batch)
    fetched = gather_rows(batch, index, [[0, 1, 2, 3, 4]] * 2)
    values = {row: torch.full((index.lengths[row],), float(row)) for row in range(5)} if dist.get_rank() == 1 else {}
    return fetched["sample_id"].tolist(), scatter_column("x", index, [(1, range(5))], values).tolist()


def test_rows_gathered_by_several_ranks_are_scattered_by_one(ranks):
    (first, own), (second, other) = ranks.run(2, replicated)
    assert first == second == [0, 2, 3, 5, 7]
    assert own == [3.0] * 7 + [2.0] * 5
    assert other == [0.0] * 2 + [4.0] * 9 + [1.0] * 4


def sent_bytes(wanted, layers):
    """Bytes that this rank sends to each other rank, by gather and scatter, and the gathered rows."""
    batch = rows_held_by(dist.get_rank()) if dist.get_rank() < 3 else rows_held_by(1)
    batch["routed"] = (10 * batch["tokens"][:, None] + torch.arange(4)).short()
    index = RowIndexer().index(batch)
    needed = [[ColumnPart("tokens"), ColumnPart("routed", part)] if part else [] for part in layers]
    sent, send = Counter(), dist.isend

    def counting(values, rank, **options):
        sent[rank] += values.numel()
        return send(values, rank, **options)

    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"), mock.patch.object(dist, "isend", counting):
        fetched = gather_rows(batch, index, wanted, needed)
        gathered = Counter(sent)
        sent.clear()
        scatter_column("x", index, [(3, range(5))], {row: torch.ones(n) for row, n in enumerate(index.lengths)})
    planned, returned = Counter(), Counter()
    for delivery in plan_deliveries(index, wanted, needed, ranks_per_node=2):
        for sender, receiver in delivery.hops:
            planned[sender, receiver] += delivery.num_bytes
    for part in plan_returns(index, [(3, range(5))]):
        returned[part.sender, part.owner] += part.num_bytes
    return fetched, gathered, planned, dict(sent), returned


def test_gather_and_scatter_send_only_the_bytes_of_the_plan(ranks):
    # Owners are rank 0 (rows 2 and 3) and rank 2 (rows 0, 1, 4). Ranks 2 and 3 of node 1 want the same columns.
    results = ranks.run(4, sent_bytes, [[], [3], [0, 3, 4], [0, 3, 4]], [(), (1,), (0, 3), (0, 3)])
    for rank, (fetched, gathered, planned, scattered, returned) in enumerate(results):
        assert gathered == {to: size for (sender, to), size in planned.items() if sender == rank}
        assert scattered == {to: size for (sender, to), size in returned.items() if sender == rank != to}
        for i, sample_id in enumerate(fetched.lengths.tolist()):
            layers = {1: [1], 2: [0, 3], 3: [0, 3]}[rank]
            tokens = [10 * (sample_id - 2) + t for t in range(sample_id)]
            assert fetched.row("tokens", i).tolist() == tokens
            assert fetched.row("routed", i).tolist() == [[10 * token + layer for layer in layers] for token in tokens]
    # Row 3, of 7 tokens with 8 and 4 bytes, crosses to node 1 once; rank 2 passes it on with its own rows 0 and 4.
    assert [gathered for _, gathered, *_ in results] == [
        *({1: 7 * (8 + 2), 2: 7 * (8 + 4)}, {}, {3: (7 + 2 + 9) * (8 + 4)}, {})
    ]
    assert results[3][3] == {0: 4 * (5 + 7), 2: 4 * (2 + 4 + 9)}


def gathered_by_other_ranks():
    """Bytes that the owner of all rows allocates while it sends them: of one tensor, and of all at once."""
    rows = 64 if dist.get_rank() == 0 else 0
    batch = Batch([500] * rows)
    batch["sample_id"] = torch.arange(rows)
    batch["loss_mask"] = batch.positions > 1
    batch["tokens"] = torch.arange(batch.total_tokens)
    index = RowIndexer().index(batch)
    limit = mock.patch.object(row_dispatch, "PIECE_BYTES", 16384, create=True)
    with limit, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as record:
        fetched = gather_rows(batch, index, [[], range(64), range(64), range(64)])
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(changes, default=0), max(accumulate(changes), default=0), fetched


def test_gather_rows_owner_holds_few_pieces_in_addition_to_its_rows(ranks):
    (largest, peak, _), *others = ranks.run(4, gathered_by_other_ranks)
    assert 8192 < largest <= 16384
    assert 16384 < peak <= 6 * 16384
    for _, _, fetched in others:
        assert fetched["tokens"].tolist() == list(range(64 * 500))


def gathered_with_images(takes):
    """Images of the rows that this rank receives, bytes that it sends, and whether equal images are one object."""
    rank = dist.get_rank()
    batch = rows_held_by(rank)
    small, large = Image(b"s" * 10), Image(b"l" * 1000)
    if rank != 0:  # the rows of rank 0 have none, and it does not know of images
        batch.images = [(large, small) if i == 7 else (large,) for i in batch["sample_id"].tolist()]
    index, sent, exchange = RowIndexer().index(batch), [], row_dispatch.all_to_all_bytes

    def counting(outgoing):
        sent.append([part.numel() for part in outgoing])
        return exchange(outgoing)

    with mock.patch.object(row_dispatch, "all_to_all_bytes", counting):
        fetched = gather_rows(batch, index, [[4, 2, 1], [3], [0, 4]], needs_images=takes)
    images = None if fetched.images is None else [[image.data[:1] for image in row] for row in fetched.images]
    same = fetched.images is None or len({id(i) for row in fetched.images for i in row if i.data == large.data}) <= 1
    return images, sent[0], same


def test_gather_rows_sends_an_image_once_to_each_rank_that_takes_them(ranks):
    # Rows 0, 1 and 4 are those of rank 2, of samples 0, 2 and 7.
    (first, to_others, same), (second, *_), (third, sent, _) = ranks.run(3, gathered_with_images, [True, False, True])
    assert first == [[b"l", b"s"], [], [b"l"]] and same
    assert second is None and third == [[b"l"], [b"l", b"s"]]
    assert 1010 < sent[0] < 1300 and sent[1:] == [0, 0] and to_others == [0, 0, 0]
    for images, _, _ in ranks.run(3, gathered_with_images, None):
        assert images is not None


def with_equal_ids():
    return RowIndexer().index(rows_held_by(0))


def test_row_index_with_equal_sample_ids_is_refused(ranks):
    with pytest.raises(AssertionError, match="two rows of the batch have the same sample_id"):
        ranks.run(2, with_equal_ids)


def count_row_gathers(change):
    """Number of row gathers in three calls on one batch, `change` applied before the third, and the last index."""
    batch = rows_held_by(2 * dist.get_rank())
    row_gathers = []

    def counting(data):
        gathered = all_gather_bytes(data)
        row_gathers.append(any(row_plan._Report.decode(part).rows is not None for part in gathered))
        return gathered

    rows = RowIndexer()
    with mock.patch.object(row_plan, "all_gather_bytes", counting):
        first = rows.index(batch)
        assert rows.index(batch, batch.select_columns(["tokens", "sample_id"])).row_groups == first.row_groups
        change(batch)
        last = rows.index(batch)
    return sum(row_gathers), len(row_gathers), last.num_scored_tokens, last.sample_ids, last.row_groups


def no_change(batch):
    batch["values"] = torch.ones(batch.total_tokens)


def set_mask_on_rank_1(batch):
    if dist.get_rank() == 1:
        batch["loss_mask"] = batch.positions > 2


def edit_mask_in_place(batch):
    batch["loss_mask"][batch.positions == 2] = False


def set_sample_ids(batch):
    batch["sample_id"] = batch["sample_id"] + 100


def set_pairs(batch):
    batch["pair"] = batch["sample_id"] // 4


UNCHANGED = (0, 2, 3, 5, 7), ((0,), (1,), (2,), (3,), (4,))


@pytest.mark.parametrize(("change", "gathers", "collectives", "scored", "ids", "groups"), [
    (no_change, 1, 3, (0, 2, 3, 5, 7), *UNCHANGED),
    (set_mask_on_rank_1, 3, 4, (0, 1, 3, 5, 6), *UNCHANGED),
    (edit_mask_in_place, 2, 3, (0, 1, 2, 4, 6), *UNCHANGED),
    (set_sample_ids, 2, 3, (0, 2, 3, 5, 7), (100, 102, 103, 105, 107), UNCHANGED[1]),
    (set_pairs, 2, 3, (0, 2, 3, 5, 7), UNCHANGED[0], ((0, 1, 2), (3, 4))),
])  # fmt: skip
def test_row_index_is_gathered_once_for_each_state_of_the_batch(
    ranks, change, gathers, collectives, scored, ids, groups
):
    assert ranks.run(2, count_row_gathers, change) == [(gathers, collectives, scored, ids, groups)] * 2


def test_row_index_of_distributed_rows_equals_the_one_that_is_gathered_for_them(ranks):
    for kept, gathered in ranks.run(2, index_of_distributed_rows):
        assert kept == gathered
        assert kept.owner_rank == (0, 0, 1, 1, 1) and kept.local_row == (0, 1, 0, 1, 2)


def index_of_distributed_rows():
    batch, rows = rows_held_by(2 * dist.get_rank()), RowIndexer()
    prompt = Prompt(0, (1,), "", None, {})
    groups = [Group(prompt, range(0, 3)), Group(prompt, range(3, 8))]
    moved = distribute_rows(GeneratedRows(batch), groups, rows).batch
    with mock.patch.object(row_plan, "_local_rows", side_effect=AssertionError("rows are sent")):
        kept = rows.index(moved)
    return kept, RowIndexer().index(moved)


def test_row_index_of_a_selection_is_gathered_for_the_new_rows(ranks):
    for index in ranks.run(2, index_of_selection):
        assert index.sample_ids == (0, 3) and index.lengths == (2, 5)


def index_of_selection():
    batch = rows_held_by(2 * dist.get_rank())
    rows = RowIndexer()
    rows.index(batch)
    return rows.index(batch.select(batch["sample_id"] % 3 == 0).select([-1]))
