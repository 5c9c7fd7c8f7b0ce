"""Sparse attention to given keys, behind the indexers of `transformers` and as columns of a batch."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers.tiny_models import oracle
from verl_mg.batch import Batch

Selections = Sequence[Sequence[Sequence[int]] | None]
"""Keys of each token, one list for each layer that selects; None: not given."""


def drawn_keys(batch: Batch, top_k: int, layers: int) -> Selections:
    """Random keys, of two thirds of the tokens that have more than they attend to."""
    generator = torch.Generator().manual_seed(1)

    def of_token(position: int) -> Sequence[Sequence[int]] | None:
        chosen = [torch.randperm(position + 1, generator=generator)[:top_k].tolist() for _ in range(layers)]
        return chosen if position >= top_k and torch.rand(1, generator=generator) < 0.67 else None

    return [of_token(position) for position in batch.positions.tolist()]


def with_keys(batch: Batch, selections: Selections) -> Batch:
    """The batch with the keys as columns."""
    positions = batch.positions.tolist()
    sizes = [position // 8 + 1 if keys else 0 for keys, position in zip(selections, positions, strict=True)]
    parts = [(keys, size) for keys, size in zip(selections, sizes, strict=True) if keys]
    numbers = [[sum(1 << key for key in layer).to_bytes(size, "little") for layer in keys] for keys, size in parts]
    entries = [entry for of_token in numbers for entry in zip(*of_token, strict=True)]
    batch["selection_sizes"] = torch.tensor(sizes, dtype=torch.int32)
    batch["selected_keys"] = torch.tensor(entries, dtype=torch.uint8)
    return batch


class ForcedKeys:
    """Put behind an indexer of `transformers`: other keys, of tokens that come in their order, pass after pass."""

    def __init__(self, given: Sequence[Sequence[int] | None]) -> None:
        self.given, self.at = given, 0
        self.selected: list[list[int]] = []
        """What the indexer itself selects."""

    def __call__(self, indexer: Any, _: Any, output: Tensor) -> Tensor:
        given = self.given[self.at : self.at + output.shape[1]]
        self.at = (self.at + output.shape[1]) % len(self.given)
        selected = output[0].tolist()
        self.selected += selected
        taken = [other if keys is None else keys for other, keys in zip(selected, given, strict=True)]
        return torch.tensor([taken], dtype=output.dtype)


def net_with_keys(
    model: Path, layers: Sequence[int], selections: Selections
) -> tuple[torch.nn.Module, Sequence[ForcedKeys]]:
    """The model of `transformers`, the layers of which that select give these keys, and what is behind them."""
    net, forced = copy.deepcopy(oracle(model)), []
    for number, layer in enumerate(layers):
        forced.append(ForcedKeys([keys and keys[number] for keys in selections]))
        net.model.layers[layer].self_attn.indexer.register_forward_hook(forced[-1])
    return net, forced
