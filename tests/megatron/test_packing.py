"""Rows into micro-batches: nothing lost, budgets kept, work even."""

import random

from hypothesis import given
from hypothesis import strategies as st

from verl_mg.megatron.packing import pack, row_cost


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 8), st.integers(20, 100))
def test_every_row_is_packed_once_within_the_budget(lengths, ranks, budget):
    shares = pack(lengths, ranks, budget, hidden=16)
    assert sorted(row for share in shares for micro in share for row in micro) == list(range(len(lengths)))
    assert len({len(share) for share in shares}) == 1 and len(shares) == ranks and len(shares[0]) >= 1
    for share in shares:
        for micro in share:
            assert len(micro) <= 1 or sum(lengths[row] for row in micro) <= budget


def heavy_tail(count: int) -> list[int]:
    generator = random.Random(0)
    return [min(16384, int(200 * generator.paretovariate(1.1))) for _ in range(count)]


def test_micro_batches_are_few_and_work_is_even_on_heavy_tailed_lengths():
    lengths, ranks, budget, hidden = heavy_tail(4096), 8, 32768, 4096
    shares = pack(lengths, ranks, budget, hidden)
    micro_batches = sum(len(share) for share in shares)
    assert micro_batches <= -(-sum(lengths) // budget) + 2 * ranks
    costs = [sum(row_cost(lengths[row], hidden) for micro in share for row in micro) for share in shares]
    assert max(costs) / (sum(costs) / ranks) < 1.03


def test_the_cost_of_attention_grows_with_the_square():
    assert row_cost(10_000, hidden=1) > 3.9 * row_cost(5_000, hidden=1)
    assert row_cost(20, hidden=10_000) < 2.001 * row_cost(10, hidden=10_000)
