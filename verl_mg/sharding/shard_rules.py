"""How Hugging Face tensors are cut and fused into the shard of one rank of a parallel axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from verl_mg.models.hf_tensors import TensorSpec
from verl_mg.sharding.boxes import Box, Piece, Shard, full_box


class Rule(Protocol):
    """The shard of rank `rank` of `size` on the axis that cuts the parameter, made of the given tensors."""

    def __call__(self, tensors: tuple[TensorSpec, ...], rank: int, size: int) -> Shard:
        """The shard; sizes that do not divide are our mistake, a layout is checked before."""
        ...


def whole(tensors: tuple[TensorSpec, ...], rank: int, size: int) -> Shard:
    """Every rank holds the whole of the tensors, one after the other along their first dimension."""
    return FusedRows(1)(tensors, 0, 1)


def rows(tensors: tuple[TensorSpec, ...], rank: int, size: int) -> Shard:
    """Each tensor cut along its first dimension: a rank holds its slab of every tensor in turn."""
    return FusedRows(size)(tensors, rank, size)


def columns(tensors: tuple[TensorSpec, ...], rank: int, size: int) -> Shard:
    """The one tensor, cut along its second dimension."""
    (tensor,) = tensors
    height, width = tensor.shape[0], tensor.shape[1] // size
    source: Box = ((0, height), (rank * width, (rank + 1) * width))
    return Shard((height, width), (Piece(tensor.name, source, full_box((height, width))),))


@dataclass(frozen=True)
class FusedRows:
    """Several tensors fused along their first dimension, and cut along it.

    The tensors are divided into `units`; the fused parameter is unit after unit, in each unit one slab of
    every tensor in turn, and a rank holds a run of whole units. Megatron's fused QKV has a unit for each
    query group.
    """

    units: int

    def __call__(self, tensors: tuple[TensorSpec, ...], rank: int, size: int) -> Shard:
        """See `Rule`; all tensors have the same dimensions after the first."""
        mine = range(rank * self.units // size, (rank + 1) * self.units // size)
        return _slabs([(tensor, self.units, unit) for unit in mine for tensor in tensors])


@dataclass(frozen=True)
class HeadRows:
    """q, k and v, a slab of each in turn; a rank has at least one of the `kv_heads`, which ranks may share.

    With more ranks than heads, `size / kv_heads` neighbours hold the same key-value head.
    """

    kv_heads: int

    def __call__(self, tensors: tuple[TensorSpec, ...], rank: int, size: int) -> Shard:
        """See `Rule`; the tensors are q, k and v."""
        q, *kv = tensors
        parts = min(size, self.kv_heads)
        return _slabs([(q, size, rank), *((tensor, parts, rank * parts // size) for tensor in kv)])


@dataclass(frozen=True)
class VocabularyRows:
    """The rows of a vocabulary, padded to a multiple of `multiple` rows, on each rank or over all ranks."""

    multiple: int
    on_each_rank: bool = True

    def __call__(self, tensors: tuple[TensorSpec, ...], rank: int, size: int) -> Shard:
        """See `Rule`; padding comes after the last token."""
        (tensor,) = tensors
        vocab, rest = tensor.shape[0], full_box(tensor.shape[1:])
        height = self.padded(vocab, size) // size
        start, stop = min(rank * height, vocab), min((rank + 1) * height, vocab)
        real = stop - start
        pieces = (Piece(tensor.name, ((start, stop), *rest), ((0, real), *rest)),) if real else ()
        padding = (((real, height), *rest),) if real < height else ()
        return Shard((height, *tensor.shape[1:]), pieces, padding)

    def padded(self, vocab: int, size: int) -> int:
        """Rows of the vocabulary over all ranks, padding included."""
        over_all = -(-vocab // self.multiple) * self.multiple
        if not self.on_each_rank and over_all % size == 0:
            return over_all
        return -(-vocab // (size * self.multiple)) * size * self.multiple


def _slabs(parts: list[tuple[TensorSpec, int, int]]) -> Shard:
    """(tensor, in how many slabs it is cut, which of them), one after the other along the first dimension."""
    pieces, row = [], 0
    rest = parts[0][0].shape[1:]
    for tensor, count, index in parts:
        height = tensor.shape[0] // count
        source = ((index * height, (index + 1) * height), *full_box(rest))
        pieces.append(Piece(tensor.name, source, ((row, row + height), *full_box(rest))))
        row += height
    return Shard((row, *rest), tuple(pieces))
