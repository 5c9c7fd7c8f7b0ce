"""Plan of a transfer of rows, against the sets of bytes that each rank has and wants."""

import random
from collections import Counter, defaultdict

import pytest
import torch

from verl_mg.batch import ColumnKind
from verl_mg.rows.plan import ColumnPart, ColumnSchema, Delivery, Return, RowIndex, plan_deliveries, plan_returns

TOKENS, MASK, REWARD = ColumnPart("tokens"), ColumnPart("loss_mask"), ColumnPart("reward")
CANDIDATES = ColumnPart("support_ids")
SCHEMA = {
    "loss_mask": ColumnSchema(ColumnKind.TOKEN, torch.bool, ()),
    "reward": ColumnSchema(ColumnKind.SEQUENCE, torch.float32, ()),
    "support_ids": ColumnSchema(ColumnKind.CANDIDATE, torch.int32, ()),
    "routed_experts": ColumnSchema(ColumnKind.TOKEN, torch.int16, (4, 2)),
    "tokens": ColumnSchema(ColumnKind.TOKEN, torch.int64, ()),
}
WIDTHS = {"loss_mask": 1, "tokens": 8}
"""Bytes of an entry of the token columns that are not divided."""


def routed(*layers):
    return ColumnPart("routed_experts", layers)


def index(owners, lengths):
    rows = range(len(owners))
    local = [owners[:row].count(owners[row]) for row in rows]
    candidates = tuple(3 * length for length in lengths)
    counted = {ColumnKind.CANDIDATE: candidates}
    return RowIndex(tuple(rows), tuple(owners), tuple(local), tuple(lengths), (), (), SCHEMA, counted=counted)


def test_plan_deliveries_of_stages_on_two_nodes_equals_hand_count():
    # tp2-pp2 on ranks 0 to 3 of node 0 and 4 to 7 of node 1, rows 0 and 2 for the first, row 1 for the second.
    rows = index(owners=[1, 1, 6], lengths=[10, 20, 30])
    wanted = [[0, 2]] * 4 + [[1]] * 4
    first, last = [TOKENS, routed(0, 1)], [TOKENS, MASK, routed(2, 3)]
    deliveries = plan_deliveries(rows, wanted, [first, first, last, last] * 2, ranks_per_node=4)
    assert sorted(deliveries, key=lambda d: (d.rows, d.entry, d.parts)) == [
        # Node 0. Its ranks are the entry for a quarter or a half of the bytes of the two rows.
        Delivery(1, 0, (), (0,), (routed(0, 1),), 80),
        Delivery(1, 0, (2, 3), (0,), (TOKENS,), 80),
        Delivery(1, 2, (3,), (0,), (routed(2, 3), MASK), 90),
        # Node 1, row 1 of rank 1: its middle is at the border of two runs.
        Delivery(1, 5, (4,), (1,), (routed(0, 1),), 160),
        Delivery(1, 6, (4, 5, 7), (1,), (TOKENS,), 160),
        Delivery(1, 7, (6,), (1,), (routed(2, 3), MASK), 180),
        # Node 0, row 2 of rank 6.
        Delivery(6, 1, (0,), (2,), (routed(0, 1),), 240),
        Delivery(6, 2, (0, 1, 3), (2,), (TOKENS,), 240),
        Delivery(6, 3, (2,), (2,), (routed(2, 3), MASK), 270),
    ]


def test_plan_deliveries_of_rows_that_only_their_owners_want_is_empty():
    assert plan_deliveries(index([0, 1], [3, 4]), [[0], [1]], [[TOKENS]] * 2, 2) == []


def units(part):
    """What a part consists of: its layers, or the column."""
    return [(part.name, layer) for layer in part.layers] if part.layers is not None else [(part.name, None)]


def unit_bytes(name, length):
    return 4 if name == "reward" else length * WIDTHS.get(name, 4 * 3 if name == "support_ids" else 4)


@pytest.mark.parametrize("seed", range(20))
def test_plan_deliveries_moves_each_wanted_byte_once_and_into_a_node_once(seed):
    draw = random.Random(seed)
    ranks, per_node, stages = draw.choice([4, 6, 12]), draw.choice([1, 2, 4]), draw.choice([1, 2, 4])
    number = draw.randint(0, 15)
    rows = index([draw.randrange(ranks) for _ in range(number)], [draw.randint(1, 9) for _ in range(number)])
    slots = [draw.sample(range(number), draw.randint(0, number)) for _ in range(3)]
    wanted = [draw.choice(slots) for _ in range(ranks)]
    by_stage = {1: [routed(0, 1, 2, 3)], 2: [routed(0, 2), routed(1, 3)], 4: [routed(i) for i in range(4)]}[stages]
    columns = [[*([TOKENS] if stage in (0, stages - 1) else []), part] for stage, part in enumerate(by_stage)]
    columns[-1] += [MASK, REWARD, CANDIDATES]
    needed = [draw.choice(columns) for _ in range(ranks)]
    has = {rank: {(row, None) for row in range(number) if rows.owner_rank[row] == rank} for rank in range(ranks)}
    arrived, entered = Counter(), Counter()
    for delivery in plan_deliveries(rows, wanted, needed, per_node):
        content = [(row, unit) for row in delivery.rows for part in delivery.parts for unit in units(part)]
        assert delivery.num_bytes == sum(unit_bytes(name, rows.lengths[row]) for row, (name, _) in content)
        for sender, receiver in delivery.hops:
            assert sender != receiver
            for row, unit in content:
                assert (row, None) in has[sender] or (row, unit) in has[sender]
                has[receiver].add((row, unit))
                arrived[receiver, row, unit] += 1
                if sender // per_node != receiver // per_node:
                    entered[receiver // per_node, row, unit] += 1
    expected = {
        (rank, row, unit)
        for rank in range(ranks)
        for row in wanted[rank]
        if rows.owner_rank[row] != rank
        for part in needed[rank]
        for unit in units(part)
    }
    assert set(arrived) == expected and set(arrived.values()) <= {1}
    across = {
        (rank // per_node, *wish)
        for rank, *wish in expected
        if rows.owner_rank[wish[0]] // per_node != rank // per_node
    }
    assert set(entered) == across and set(entered.values()) <= {1}


def test_plan_deliveries_divides_rows_evenly_among_ranks_of_a_node():
    owners = [owner for owner in range(16, 32) for _ in range(20)]
    rows = index(owners, [50 + 7 * i % 13 for i in range(320)])
    deliveries = plan_deliveries(rows, [range(320)] * 8 + [()] * 24, [[TOKENS]] * 32, ranks_per_node=8)
    received, peers = Counter(), defaultdict(set)
    for delivery in deliveries:
        received[delivery.entry] += delivery.num_bytes
        peers[delivery.owner].add(delivery.entry)
    longest = 8 * max(rows.lengths)
    assert sorted(received) == list(range(8))
    assert max(received.values()) - min(received.values()) <= 2 * longest
    assert max(map(len, peers.values())) <= 2


def test_delivery_pieces_are_runs_of_rows_below_the_limit():
    rows = index([0] * 5, [2, 2, 9, 1, 1])
    delivery = Delivery(0, 1, (2,), (0, 1, 2, 3, 4), (TOKENS,), 120)
    pieces = list(delivery.pieces(rows, 32))
    assert [(piece.rows, piece.num_bytes) for piece in pieces] == [((0, 1), 32), ((2,), 72), ((3, 4), 16)]
    assert all((piece.owner, piece.entry, piece.receivers) == (0, 1, (2,)) for piece in pieces)


def test_plan_returns_has_a_message_for_each_pair_of_ranks_with_rows():
    rows = index(owners=[3, 0, 3, 3], lengths=[5, 6, 7, 8])
    assert plan_returns(rows, [(1, [0, 1]), (2, []), (3, [3, 2])]) == [
        Return(1, 3, (0,), 20),
        Return(1, 0, (1,), 24),
        Return(3, 3, (3, 2), 60),
    ]
