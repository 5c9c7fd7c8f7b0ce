"""Packed sequences, and what functions of their queries, keys and values return."""

import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from verl_mg.megatron.packed_sequences import PackedSequences, describe_sequences

WIDTH = 8
"""Width of a head."""


def described(lengths: tuple[int, ...], keys: tuple[int, ...] | None) -> PackedSequences:
    """Sequences with these numbers of queries, and of keys where some are those of other sequences."""
    gathered = (torch.tensor(keys), torch.zeros(sum(keys), dtype=torch.int64)) if keys else ()
    return describe_sequences(torch.tensor(lengths), torch.ones(WIDTH // 2), 1.0, *gathered)


def outputs_and_gradients(
    functions: Iterable[Callable[..., Tensor]], inputs: list[Tensor], module: torch.nn.Module | None = None
) -> list[list[Tensor]]:
    """Outputs of functions of queries, keys and values, and gradients of these and of the sinks of a module."""
    gradient, results = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)), []
    parameters = () if module is None else tuple(module.parameters())
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # torch refuses gradients on the CPU, for its compiler; not compiled it computes them, and warns.
        patch.setattr(flex_attention, "_validate_device", lambda *_: None)
        warnings.simplefilter("ignore")
        for attend in functions:
            leaves = [values.clone().requires_grad_() for values in inputs]
            context = attend(*leaves)
            results.append([context.detach(), *torch.autograd.grad(context, [*leaves, *parameters], gradient)])
    return results
