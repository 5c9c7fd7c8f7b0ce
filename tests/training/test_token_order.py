"""The tokens of each context-parallel rank."""

import pytest
import torch

from verl_mg.training.microbatch import TokenShard, token_order, zigzag_tokens

LENGTHS = torch.tensor([5, 16, 1, 9])


def orders(cp, zigzag, tp=1, multiple=1, lengths=LENGTHS):
    return [token_order(lengths, TokenShard(tp, cp, 0, rank), multiple, zigzag) for rank in range(cp)]


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize(("cp", "tp", "multiple"), [(1, 1, 1), (2, 1, 1), (2, 4, 1), (4, 2, 16), (3, 1, 1)])
def test_token_order_gives_each_packed_token_to_one_rank_and_all_equally_many(zigzag, cp, tp, multiple):
    of_ranks = orders(cp, zigzag, tp, multiple)
    assert {order.total for order in of_ranks} == {of_ranks[0].total}
    places = torch.cat([order.local for order in of_ranks])
    assert places.sort().values.tolist() == list(range(of_ranks[0].total))
    for order in of_ranks:
        assert len(order.local) * cp == order.total and len(order.local) % (tp * multiple) == 0
        assert order.zigzag == (zigzag and cp > 1)
        assert order.local_index(order.local).tolist() == list(range(len(order.local)))


@pytest.mark.parametrize(("cp", "zigzag"), [(2, False), (2, True), (4, True)])
def test_token_order_keeps_rows_together_at_the_start_of_their_sequences(cp, zigzag):
    order = orders(cp, zigzag)[0]
    starts = order.lengths.cumsum(0) - order.lengths
    expected = [
        start + i for start, length in zip(starts.tolist(), LENGTHS.tolist(), strict=False) for i in range(length)
    ]
    assert order.places.tolist() == expected
    if zigzag:
        assert not (order.lengths % (2 * cp)).any() and (order.lengths[:4] - LENGTHS).max() < 2 * cp


def test_zigzag_ranks_have_an_early_and_a_late_chunk_and_equal_work():
    assert zigzag_tokens(torch.tensor([8]), 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_tokens(torch.tensor([8, 4]), 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    work = {int((zigzag_tokens(torch.tensor([64]), 4, rank) + 1).sum()) for rank in range(4)}
    assert len(work) == 1


@pytest.mark.parametrize("zigzag", [False, True])
def test_token_order_without_rows_has_one_sequence(zigzag):
    for order in orders(2, zigzag, lengths=torch.tensor([], dtype=torch.int64)):
        assert len(order.lengths) == 1 and len(order.places) == 0 and len(order.local) == order.total // 2 > 0
