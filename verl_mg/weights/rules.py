"""How Hugging Face tensors are cut and fused into the shard of one tensor-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from verl_mg.weights.boxes import Box, Piece, Shard, full_box


@dataclass(frozen=True)
class HFTensor:
    """A tensor of the checkpoint: its name and global shape."""

    name: str
    shape: tuple[int, ...]


class Rule(Protocol):
    """The shard of tensor-parallel rank `rank` of `size`, made of the given tensors."""

    def __call__(self, tensors: tuple[HFTensor, ...], rank: int, size: int) -> Shard:
        """The shard; sizes that do not divide are our mistake, a layout is checked before."""
        ...


def replicated(tensors: tuple[HFTensor, ...], rank: int, size: int) -> Shard:
    """Every rank holds the whole of the one tensor."""
    (tensor,) = tensors
    box = full_box(tensor.shape)
    return Shard(tensor.shape, (Piece(tensor.name, box, box),))


def columns(tensors: tuple[HFTensor, ...], rank: int, size: int) -> Shard:
    """The one tensor, cut along its second dimension."""
    (tensor,) = tensors
    rows, width = tensor.shape[0], tensor.shape[1] // size
    source: Box = ((0, rows), (rank * width, (rank + 1) * width))
    return Shard((rows, width), (Piece(tensor.name, source, full_box((rows, width))),))


@dataclass(frozen=True)
class FusedRows:
    """Several tensors fused along their first dimension, and cut along it.

    The tensors are divided into `units`; the fused parameter is unit after unit, in each unit one slab of
    every tensor in turn, and a rank holds a run of whole units. With `units` None there is one a rank.
    Megatron's fused QKV has a unit for each query group, its gate and up projections one a rank.
    """

    units: int | None = None

    def __call__(self, tensors: tuple[HFTensor, ...], rank: int, size: int) -> Shard:
        """See `Rule`; all tensors have the same dimensions after the first."""
        units = self.units or size
        mine = range(rank * units // size, (rank + 1) * units // size)
        pieces, row = [], 0
        for unit in mine:
            for tensor in tensors:
                slab = tensor.shape[0] // units
                rest = full_box(tensor.shape[1:])
                source = ((unit * slab, (unit + 1) * slab), *rest)
                pieces.append(Piece(tensor.name, source, ((row, row + slab), *rest)))
                row += slab
        return Shard((row, *tensors[0].shape[1:]), tuple(pieces))


@dataclass(frozen=True)
class VocabularyRows:
    """The rows of a vocabulary, padded so that every rank holds the same multiple of `multiple` rows."""

    multiple: int

    def __call__(self, tensors: tuple[HFTensor, ...], rank: int, size: int) -> Shard:
        """See `Rule`; padding comes after the last token."""
        (tensor,) = tensors
        vocab, rest = tensor.shape[0], full_box(tensor.shape[1:])
        rows = padded_vocabulary(vocab, size, self.multiple) // size
        start, stop = min(rank * rows, vocab), min((rank + 1) * rows, vocab)
        real = stop - start
        pieces = (Piece(tensor.name, ((start, stop), *rest), ((0, real), *rest)),) if real else ()
        padding = (((real, rows), *rest),) if real < rows else ()
        return Shard((rows, *tensor.shape[1:]), pieces, padding)


def padded_vocabulary(vocab: int, size: int, multiple: int) -> int:
    """The smallest vocabulary from `vocab` on that gives each of `size` ranks a multiple of `multiple` rows."""
    step = size * multiple
    return -(-vocab // step) * step
