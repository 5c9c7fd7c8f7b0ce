"""Tensors without elements against torch's own tensors, under the operations of weight loaders."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.random_models import assemble, numbered
from verl_mg.errors import UserError
from verl_mg.sharding.symbolic_tensor import NotAMoveError, SymbolicTensor, shard_of

SHAPES = {"a": (8, 6), "b": (8, 6), "c": (8, 6)}


def interleaved(tensor, dim):
    """As `transformers` reorders the halves of rotary embeddings."""
    shape = list(tensor.shape)
    shape[dim : dim + 1] = [shape[dim] // 2, 2]
    return tensor.reshape(shape).transpose(dim, dim + 1).reshape(tensor.shape).contiguous()


VIEWS = {
    "whole": lambda t: t,
    "copy": lambda t: t.to(torch.bfloat16).float().clone(),
    "rows": lambda t: t.chunk(2)[1],
    "columns": lambda t: t[:, 2:5],
    "unbound": lambda t: t.unbind()[3][None],
    "split": lambda t: t.split([2, 6])[1],
    "heads": lambda t: t.view(2, 4, 6)[1],
    "interleaved rows": lambda t: interleaved(t, 0),
    "interleaved columns": lambda t: interleaved(t, 1),
    "transposed": lambda t: t.T,
    "columns, transposed": lambda t: t[:, 2:5].transpose(-1, -2).contiguous(),
    "between others": lambda t: t.unsqueeze(1),
    "last dimension first": lambda t: t.view(2, 4, 6).permute(2, 0, 1).flatten(1),
    "rotary heads": lambda t: t.view(2, 2, 2, 6).transpose(1, 2).reshape(8, 6),
}


@given(st.lists(st.sampled_from(sorted(SHAPES)), min_size=1, max_size=3, unique=True), st.sampled_from(sorted(VIEWS)),
       st.sampled_from(["first", "rows", "columns", "stack", "stack and rows"]))  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_shard_of_moved_tensor_equals_moved_elements(names, view, join):
    def loaded(tensors):
        parts = [VIEWS[view](tensors[name]) for name in names]
        if join == "first":
            return parts[0]
        if join in ("rows", "columns"):
            return torch.cat(parts, dim=0 if join == "rows" else -1)
        stack = torch.stack(parts)
        return stack if join == "stack" else torch.cat([stack, torch.stack(parts[::-1])], dim=1)

    expected = loaded(numbered(SHAPES, torch.float32))
    shard = shard_of("p", loaded({name: SymbolicTensor.of(name, shape) for name, shape in SHAPES.items()}))
    assert torch.equal(shard.as_parameter(assemble(shard, numbered(SHAPES, torch.float32))), expected)


def test_shard_of_transposed_stack_has_a_piece_for_each_tensor():
    a, b = (SymbolicTensor.of(name, (8, 6)) for name in "ab")
    shard = shard_of("p", torch.stack([a, b]).transpose(1, 2)[:, :, :])
    assert (shard.shape, shard.order, len(shard.pieces)) == ((2, 8, 6), (0, 2, 1), 2)
    assert shard.parameter_shape == (2, 6, 8)


@pytest.mark.parametrize(
    "change",
    [lambda t: t * 2, lambda t: t.add_(1), lambda t: t + t, lambda t: t.roll(1), lambda t: t.flip(0)],
)
def test_symbolic_tensor_refuses_what_is_not_followed(change):
    with pytest.raises(NotAMoveError, match="a"):
        change(SymbolicTensor.of("a", (8, 6)))


@pytest.mark.parametrize(
    "change",
    [lambda t: t.reshape(-1), lambda t: t[:1].expand(8, 6), lambda t: t[:, 0], lambda t: torch.cat([t, t.T[:, :6]])],
)
def test_shard_of_reordered_tensor_names_tensor_and_parameter(change):
    with pytest.raises(UserError, match=r"^a: transformers reshapes or shuffles it to fill the parameter p, "):
        shard_of("p", change(SymbolicTensor.of("a", (8, 6))))
