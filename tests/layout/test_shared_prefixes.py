"""Rows that share prefixes: what a micro-batch computes, counted in a trie of their tokens, and their packing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mg.layout.shared_prefixes import PrefixLinks, SharingRows, join_groups
from verl_mg.models.flops import RowFlops

STEPS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 12), st.integers(0, 8)), min_size=1, max_size=14)
"""Of each row: the number of its parent modulo the rows before, first tokens of it, and tokens of its own."""
FLOPS = RowFlops(20.0, 1.0)


def rows_of(steps):
    """Token lists of rows and their links: every token that a row does not share occurs once."""
    rows, parents, shared = [], [], []
    for number, (parent, count, own) in enumerate(steps):
        parent = parent % number if number and parent % 3 else number
        count = min(count, len(rows[parent])) if parent != number else 0
        fresh = [(number, i) for i in range(max(own, not count))]
        rows.append([*(rows[parent][:count] if count else []), *fresh])
        parents.append(parent if count else number)
        shared.append(count)
    return rows, PrefixLinks([len(row) for row in rows], parents, shared)


def tokens_of_trie(rows):
    return len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})


@given(STEPS, st.randoms(use_true_random=False))
def test_sharing_rows_compute_each_token_once_whatever_rows_are_there(steps, shuffler):
    rows, links = rows_of(steps)
    some = [number for number in range(len(rows)) if shuffler.random() < 0.7]
    shuffler.shuffle(some)
    shared = SharingRows.of(links, some).shared
    computed = sum(len(rows[row]) - shared.get(row, (row, 0))[1] for row in some)
    assert computed == tokens_of_trie([rows[row] for row in some])
    for row, (other, count) in shared.items():
        assert rows[row][:count] == rows[other][:count] and other in some
        assert count > shared.get(other, (other, 0))[1], "the other row computes the last of them"


@given(STEPS, st.integers(1, 4), st.integers(8, 80))
def test_join_groups_keeps_each_row_once_within_the_budget(steps, ranks, budget):
    rows, links = rows_of(steps)
    units = join_groups([[row] for row in range(len(rows))], links, lambda n, s: n - s, FLOPS, ranks, budget)
    assert sorted(row for unit in units for row in unit.rows) == list(range(len(rows)))
    for unit in units:
        assert unit.tokens == tokens_of_trie([rows[row] for row in unit.rows])
        assert len(unit.rows) == 1 or unit.tokens <= budget
        assert len({links.path(row)[0] for row in unit.rows}) == 1
    assert sum(unit.cost for unit in units) <= sum(FLOPS(len(row)) for row in rows)


@given(STEPS)
def test_join_groups_on_one_rank_computes_each_token_once(steps):
    rows, links = rows_of(steps)
    units = join_groups([[row] for row in range(len(rows))], links, lambda n, s: n - s, FLOPS, 1, 10**6)
    assert sum(unit.tokens for unit in units) == tokens_of_trie(rows)
    assert len(units) == len({links.path(row)[0] for row in range(len(rows))})


@pytest.mark.parametrize(("prefix", "units"), [(1000, 1), (10, 8)])
def test_join_groups_divides_a_tree_unless_its_prefix_is_long(prefix, units):
    """One trajectory of 8 rows on 4 ranks: each row adds 100 tokens to the prefix."""
    links = PrefixLinks([prefix + 100] * 8, [0] * 8, [0] + [prefix] * 7)
    found = join_groups([[row] for row in range(8)], links, lambda n, s: n - s, FLOPS, 4, 10**6)
    assert len(found) == units


def test_links_of_prompts_are_to_the_first_row_that_has_no_other_parent():
    prompts = [(7, 3), (8, 3), (7, 3), (7, 4), (7, 3), (0, 0), (0, 0)]
    links = PrefixLinks.from_columns(range(7), [10] * 7, [0, 1, 2, 3, 2, 5, 6], [0, 0, 0, 0, 5, 0, 0], prompts)
    assert links.parents == [0, 1, 0, 3, 2, 5, 6] and links.shared == [0, 0, 3, 0, 5, 0, 0]
    assert links.saved == 8 / 70


def test_join_groups_keeps_pairs_together():
    links = PrefixLinks([10, 10, 10, 10], [0, 0, 2, 2], [0, 6, 0, 6])
    units = join_groups([[0, 2], [1, 3]], links, lambda n, s: n - s, FLOPS, 1, 100)
    assert [unit.rows for unit in units] == [[0, 2, 1, 3]]


@given(st.lists(st.tuples(st.integers(-1, 9), st.integers(0, 30)), min_size=10, max_size=10))
def test_links_from_columns_are_those_to_earlier_rows_of_the_batch(columns):
    lengths = list(range(5, 15))
    links = PrefixLinks.from_columns(range(10), lengths, *zip(*columns, strict=True))
    for row, (parent, count) in enumerate(columns):
        linked = 0 <= parent < row and count > 0
        assert links.parents[row] == (parent if linked else row)
        assert links.shared[row] == (min(count, lengths[row], lengths[parent]) if linked else 0)


def test_row_flops_of_a_tree_are_those_of_its_tokens():
    """A token attends to those before it: half of length squared pairs, as in the formula for a whole row."""
    assert FLOPS(10, 4) == FLOPS(10) - FLOPS(4) and FLOPS(10, 10) == 0
