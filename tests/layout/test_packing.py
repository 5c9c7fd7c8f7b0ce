"""Rows into micro-batches: nothing lost, budgets kept, work even."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.docs.lengths import longest_to, read_lengths
from verl_mg.layout.packing import EVEN, pack
from verl_mg.models.flops import row_flops
from verl_mg.models.hf_config import read_config
from verl_mg.sharding.weight_table import weight_table

TOOLS = Path(__file__).parents[2] / "tools"
LENGTHS = st.lists(st.integers(1, 50), max_size=40)


def quadratic(length: int) -> float:
    return length * (20 + length)


@given(LENGTHS, st.integers(1, 8), st.integers(20, 100))
def test_pack_each_row_once_within_the_budget(lengths, ranks, budget):
    shares = pack(lengths, [quadratic(length) for length in lengths], ranks, budget)
    assert sorted(row for share in shares for micro in share for row in micro) == list(range(len(lengths)))
    assert len({len(share) for share in shares}) == 1 and len(shares) == ranks and len(shares[0]) >= 1
    for share in shares:
        for micro in share:
            assert len(micro) <= 1 or sum(lengths[row] for row in micro) <= budget


@given(LENGTHS, st.integers(1, 8), st.integers(20, 100))
def test_pack_ranks_differ_by_at_most_one_micro_batch(lengths, ranks, budget):
    """The bound of dealing in steps; moving rows only comes closer."""
    costs = [quadratic(length) for length in lengths]
    shares = pack(lengths, costs, ranks, budget)
    loads = [sum(costs[row] for micro in share for row in micro) for share in shares]
    each = [sum(costs[row] for row in micro) for share in shares for micro in share]
    assert max(loads) - min(loads) <= max(max(each) - min(each), max(costs, default=0))


@given(LENGTHS, st.integers(1, 8), st.randoms(use_true_random=False))
def test_pack_is_deterministic_and_independent_of_row_order(lengths, ranks, shuffler):
    def loads(rows):
        costs = [quadratic(length) for length in rows]
        shares = pack(rows, costs, ranks, 60)
        assert shares == pack(list(rows), list(costs), ranks, 60)
        return sorted(sum(costs[row] for micro in share for row in micro) for share in shares)

    shuffled = list(lengths)
    shuffler.shuffle(shuffled)
    assert loads(lengths) == loads(shuffled)


@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 5))
def test_pack_equal_rows_are_distributed_equally(each, ranks, per_micro_batch):
    """In full micro-batches, where they fill them."""
    lengths = [10] * (each * ranks * per_micro_batch)
    shares = pack(lengths, [1.0] * len(lengths), ranks, 10 * per_micro_batch)
    assert [[len(micro) for micro in share] for share in shares] == [[per_micro_batch] * each] * ranks


def test_pack_steps_are_even_where_rows_allow_it():
    """Long rows meet long rows: none waits beside one for short ones."""
    lengths = [80] * 4 + [10] * 32
    costs = [length**2 for length in lengths]
    shares = pack(lengths, costs, 4, 80)
    for step in zip(*shares, strict=True):
        assert len({sum(costs[row] for row in micro) for micro in step}) == 1


@pytest.fixture(scope="module")
def recorded():
    return read_lengths(TOOLS / "docs" / "lengths_of_samples" / "random_qwen3_4096.txt")


def test_recorded_lengths_are_heavy_tailed(recorded):
    responses = sorted(length.response for length in recorded)
    assert len(responses) == 4096 and responses[4055] >= 5 * responses[2048]


@pytest.mark.parametrize("model", ["qwen2_5_7b", "deepseek_v3"])  # hidden 3584 and 7168
@pytest.mark.parametrize("longest", [8192, 16384])
@pytest.mark.parametrize("ranks", [8, 64])
def test_pack_recorded_lengths_are_balanced_with_little_padding(recorded, model, longest, ranks):
    table = weight_table(read_config(TOOLS / "model_configs" / f"{model}.json"))
    flops = row_flops(table.config, table.tensor_index)
    lengths = [length.total for length in longest_to(recorded, longest)]
    costs = [flops(length) for length in lengths]
    shares = pack(lengths, costs, ranks, longest)
    loads = [sum(costs[row] for micro in share for row in micro) for share in shares]
    assert max(loads) / (sum(loads) / ranks) < 1.03
    parts = 8 * 2
    tokens = [sum(lengths[row] for row in micro) for share in shares for micro in share]
    padded = sum(-each % parts if each else parts for each in tokens)
    assert padded < 0.02 * sum(lengths)
    assert len(tokens) <= 1.1 * sum(lengths) / longest + ranks, "micro-batches are few"


def test_pack_moves_rows_until_ranks_are_even():
    generator = random.Random(0)
    lengths = [min(16384, int(200 * generator.paretovariate(1.1))) for _ in range(4096)]
    costs = [quadratic(length) for length in lengths]
    loads = [sum(costs[row] for micro in share for row in micro) for share in pack(lengths, costs, 16, 32768)]
    assert max(loads) - min(loads) <= EVEN * sum(loads) / 16
