"""Cuts, fusions and stackings are read off codes again, exactly and in as few boxes as there are."""

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_mg.errors import UserError
from verl_mg.sharding.boxes import Piece, Shard, full_box, slices
from verl_mg.tracing.position_codes import UNWRITTEN, PositionCodes, decode, is_written

CODES = PositionCodes({"q": (12, 6), "bias": (40,), "kv": (5, 6), "wide": (3, 50, 7), "scalar": (), "one": (1, 6)})


def passes(load, codes=CODES):
    """What a parameter holds after each pass of a loader, a function of the checkpoint."""
    return [load({name: codes.tensor(name, number) for name in codes.names}) for number in range(codes.passes)]


def decoded(load, codes=CODES):
    return decode("p", codes, passes(load, codes))


def numbers(codes=CODES):
    return {
        name: start + np.arange(math.prod(shape)).reshape(shape)
        for (name, shape), start in zip(codes.shapes.items(), codes.offsets.tolist(), strict=False)
    }


def put_together(shard, codes=CODES):
    """The numbers that a shard says the parameter holds, -1 for padding; every element must be in one box."""
    parameter, seen = np.full(shard.parameter_shape, -2), np.zeros(shard.shape, int)
    values = parameter.transpose(shard.order or range(parameter.ndim))
    for piece in shard.pieces:
        source = numbers(codes)[piece.tensor][slices(piece.source)]
        values[slices(piece.target)] = source.reshape(values[slices(piece.target)].shape)
        seen[slices(piece.target)] += 1
    for box in shard.padding:
        values[slices(box)] = -1
        seen[slices(box)] += 1
    assert (seen == 1).all()
    return parameter


WHOLE = [
    (lambda w, name=name: w[name], [Piece(name, full_box(s), full_box(s))], []) for name, s in CODES.shapes.items()
]
ROWS_AND_PADDING = (
    lambda w: torch.cat([w["q"][4:8], w["kv"][:2], torch.zeros(2, 6), torch.full((1, 6), UNWRITTEN), w["one"]]),
    [
        Piece("q", ((4, 8), (0, 6)), ((0, 4), (0, 6))),
        Piece("kv", ((0, 2), (0, 6)), ((4, 6), (0, 6))),
        Piece("one", ((0, 1), (0, 6)), ((9, 10), (0, 6))),
    ],
    [((6, 9), (0, 6))],
)
ADJACENT = (
    lambda w: torch.cat([w["q"][11:], w["bias"][None, :6]], dim=1),  # whose numbers follow each other
    [Piece("q", ((11, 12), (0, 6)), ((0, 1), (0, 6))), Piece("bias", ((0, 6),), ((0, 1), (6, 12)))],
    [],
)
STACKED = (
    lambda w: torch.stack([torch.cat([w[name][first:][:2] for name in ("q", "kv")]) for first in (1, 3)]),
    [
        Piece(name, ((first, first + 2), (0, 6)), ((i, i + 1), (2 * j, 2 * j + 2), (0, 6)))
        for i, first in enumerate((1, 3))
        for j, name in enumerate(("q", "kv"))
    ],
    [],
)
TRANSPOSED = {
    "a matrix": (lambda w: w["q"].T, 1, (1, 0)),
    "columns on a rank": (lambda w: w["q"].T[2:5], 1, (1, 0)),
    "two matrices side by side, and padding": (
        lambda w: torch.cat([w["q"].T, w["kv"].T[:, 1:], torch.zeros(6, 2)], dim=1), 3, (1, 0)),
    "matrices of experts": (lambda w: torch.stack([w["q"][:5].T, w["kv"].T]), 2, (0, 2, 1)),
    "the matrices of a stack": (lambda w: w["wide"].mT, 1, (0, 2, 1)),
    "the first dimension behind the others": (lambda w: w["wide"].permute(1, 2, 0), 1, (2, 0, 1)),
    "all dimensions": (lambda w: w["wide"].permute(2, 1, 0)[:, 10:30], 1, (2, 1, 0)),
}  # fmt: skip
COLUMNS = (lambda w: w["q"][:, 2:5], [Piece("q", ((0, 12), (2, 5)), ((0, 12), (0, 3)))], [])
BOX = (lambda w: w["wide"][1:, 10:30, 2:4], [Piece("wide", ((1, 3), (10, 30), (2, 4)), ((0, 2), (0, 20), (0, 2)))], [])


@pytest.mark.parametrize(("load", "pieces", "padding"), [*WHOLE, COLUMNS, ROWS_AND_PADDING, ADJACENT, STACKED, BOX])
def test_decode_parameter_has_as_few_boxes_as_there_are(load, pieces, padding):
    shape = tuple(load({name: CODES.tensor(name, 0) for name in CODES.names}).shape)
    assert decoded(load) == Shard(shape, tuple(pieces), tuple(padding))


@pytest.mark.parametrize(("load", "boxes", "order"), TRANSPOSED.values(), ids=TRANSPOSED)
def test_decode_transposed_parameter_has_a_box_for_each_tensor(load, boxes, order):
    shard, written = decoded(load), {name: torch.as_tensor(values) for name, values in numbers().items()}
    assert (len(shard.pieces) + len(shard.padding), shard.order) == (boxes, order)
    values = put_together(shard)
    assert np.array_equal(np.where(values < 0, 0, values), load(written).numpy())


def test_position_codes_are_exact_in_bfloat16_and_never_zero():
    for number in range(CODES.passes):
        for name in CODES.names:
            codes = CODES.tensor(name, number)
            assert torch.equal(codes.bfloat16().float(), codes)
            assert codes.min() >= 1


@st.composite
def slabs(draw):
    """Row slabs of equal columns: (tensor or None for padding, first row, last row, first column)."""
    chosen = []
    for name in draw(st.lists(st.sampled_from(["q", "kv", "one", None]), min_size=1, max_size=6)):
        rows = CODES.shapes[name][0] if name else 4
        start = draw(st.integers(0, rows - 1))
        chosen.append((name, start, draw(st.integers(start + 1, rows)), draw(st.integers(0, 2))))
    return chosen


def fused(slab_list, w):
    parts = [
        torch.zeros(stop - start, 4) if name is None else w[name][start:stop, column : column + 4]
        for name, start, stop, column in slab_list
    ]
    return torch.cat(parts)


@given(slabs())
def test_decode_random_fusion_restores_pieces(slab_list):
    shard = decoded(lambda w: fused(slab_list, w))
    whole_numbers = {name: torch.as_tensor(values) for name, values in numbers().items()}
    expected = fused(slab_list, whole_numbers).numpy()
    row = 0
    for name, start, stop, _ in slab_list:
        if name is None:
            expected[row : row + stop - start] = -1
        row += stop - start
    assert np.array_equal(put_together(shard), expected)
    assert len(shard.pieces) + len(shard.padding) <= len(slab_list)


@given(st.lists(slabs(), min_size=1, max_size=3))
def test_decode_random_stack_of_fusions_restores_pieces(stack):
    rows = min(sum(stop - start for _, start, stop, _ in one) for one in stack)
    shard = decoded(lambda w: torch.stack([fused(one, w)[:rows] for one in stack]))
    for index, one in enumerate(stack):
        alone = decoded(lambda w, one=one: fused(one, w)[:rows])
        assert np.array_equal(put_together(shard)[index], put_together(alone))
    assert shard.parameter_shape == (len(stack), rows, 4)


@given(st.lists(st.integers(-1, int(CODES.offsets[-1]) - 1), min_size=12, max_size=12))
def test_decode_random_scatter_is_exact(chosen):
    """Even what no loader does: single elements of one- and two-dimensional tensors anywhere."""
    deep = set(numbers()["wide"].reshape(-1).tolist())
    picked = np.array([-1 if n in deep else n for n in chosen]).reshape(3, 4)

    def load(w):
        values = torch.cat([w[name].reshape(-1) for name in CODES.names])
        return torch.where(torch.from_numpy(picked) < 0, UNWRITTEN, values[torch.from_numpy(picked)])

    assert np.array_equal(put_together(decoded(load)), picked)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + 1,
        lambda x: 2 * x,
        lambda x: -x,
        lambda x: x.roll(1) + x,
        lambda x: (x.roll(2) + x) / 2,
        lambda x: x / 3,
        lambda x: x * float("nan"),
        lambda x: x * float("inf"),
        lambda x: torch.full_like(x, 7.0),
        lambda x: torch.cat([x[:-1], torch.tensor([9.0])]),
        lambda x: torch.cat([x[:-1], torch.tensor([0.5])]),
    ],
)
def test_decode_changed_values_are_user_error(change):
    with pytest.raises(UserError, match=r"parameter p: the value at \(\d+,\) is in no tensor"):
        decoded(lambda w: change(w["bias"]))


MANY = PositionCodes({"a": (300, 300)})
SHUFFLED = torch.randperm(90000, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("load", "codes", "reason"),
    [
        (lambda w: w["wide"].flatten(0, 1), CODES, "parameter p has fewer dimensions than its tensor wide"),
        (lambda w: w["q"][:0], CODES, "parameter p has no elements"),
        (lambda w: w["a"].flatten()[SHUFFLED].view(300, 300), MANY, r"parameter p consists of \d{5} boxes"),
    ],
)
def test_decode_parameter_that_no_table_can_describe_is_user_error(load, codes, reason):
    with pytest.raises(UserError, match=reason):
        decoded(load, codes)


def test_decode_codes_beyond_the_last_tensor_are_user_error():
    small = PositionCodes({"a": (3,)})
    with pytest.raises(UserError, match="no tensor"):
        decode("p", small, passes(lambda w: w["bias"])[: small.passes])


def test_is_written_includes_zeros():
    blank = torch.full((3,), UNWRITTEN)
    assert not is_written([blank, blank])
    assert is_written([blank, torch.tensor([UNWRITTEN, UNWRITTEN, 3.0])])
    assert is_written([torch.zeros(3)] * 2)
    assert decode("p", CODES, [torch.zeros(3)] * CODES.passes) == Shard((3,), (), (((0, 3),),))


def test_decode_large_parameter_takes_about_a_second():
    codes = PositionCodes({"a": (2500, 2000), "b": (2500, 2000)})
    seen = passes(lambda w: torch.cat([w["a"][:1250], w["b"][1250:]]), codes)
    start = time.perf_counter()
    assert len(decode("p", codes, seen).pieces) == 2
    assert time.perf_counter() - start < 20  # it takes one; the machine may be busy
