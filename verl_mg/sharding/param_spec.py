"""Rules that cut and fuse Hugging Face tensors into a parameter, and the table rows that use the rules.

`rows` and `columns` mean the first and the second dimension of a weight (out, in). Megatron's "column parallel"
layers split rows in this sense.

    q (8, 4), k (4, 4), v (4, 4), two query groups, tensor parallel 2:

    FusedRows(2) on rank 0    q 0:4, k 0:2, v 0:2    the rows of group 0
    FusedRows(2) on rank 1    q 4:8, k 2:4, v 2:4
    split_columns of (8, 4)   rank 0: columns 0:2    rank 1: columns 2:4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from verl_mg.models.tensor_tree import TensorSpec
from verl_mg.sharding.boxes import Box, Order, Piece, Shard, full_box

Axis = Literal["replicated", "tensor", "attention", "vocabulary", "expert"]
"""The parallel axis that shards a parameter: none, tensor parallelism, the tensor parallelism of attention, of the
vocabulary, or of experts."""


class ShardRule(Protocol):
    """Function that gives the shard of one rank of a parallel axis."""

    def __call__(self, tensors: tuple[TensorSpec, ...], rank: int, size: int) -> Shard:
        """Returns the shard."""
        ...


def replicate(tensors: tuple[TensorSpec, ...], rank: int, size: int) -> Shard:
    """Gives every rank the whole tensors, concatenated along their first dimension."""
    return FusedRows(1)(tensors, 0, 1)


def split_rows(tensors: tuple[TensorSpec, ...], rank: int, size: int) -> Shard:
    """Cuts each tensor along its first dimension; a shard concatenates its slab of every tensor."""
    return FusedRows(size)(tensors, rank, size)


def split_columns(tensors: tuple[TensorSpec, ...], rank: int, size: int) -> Shard:
    """Cuts a single tensor along its second dimension."""
    (tensor,) = tensors
    height, width = tensor.shape[0], tensor.shape[1] // size
    source: Box = ((0, height), (rank * width, (rank + 1) * width))
    return Shard((height, width), (Piece(tensor.name, source, full_box((height, width))),))


def on_first_rank(tensors: tuple[TensorSpec, ...], rank: int, size: int) -> Shard:
    """Gives the first rank the whole tensor and the others zeros: a bias that is added before a sum over the ranks."""
    whole = replicate(tensors, 0, 1)
    return whole if rank == 0 else Shard(whole.shape, (), (full_box(whole.shape),))


@dataclass(frozen=True)
class FusedRows:
    """Rule that fuses tensors along their first dimension unit by unit, and cuts the result there.

    Each tensor is divided into `units` slabs. The fused parameter is unit after unit, and in each unit a slab of every
    tensor; a rank has a run of whole units. Megatron's fused QKV weight has one unit for each query group.
    """

    units: int  # number of units, a multiple of the ranks on the axis

    def __call__(self, tensors: tuple[TensorSpec, ...], rank: int, size: int) -> Shard:
        """Returns the shard; all tensors have the same dimensions after the first."""
        units = range(rank * self.units // size, (rank + 1) * self.units // size)
        return _concatenate([(tensor, self.units, unit) for unit in units for tensor in tensors])


@dataclass(frozen=True)
class Section:
    """Slabs of rows of one tensor at equal distances, one for each unit of a fused parameter."""

    tensor: int  # index in the parameter's tensors
    start: int  # first row of the slab of unit 0
    rows: int
    stride: int  # rows from the start of a slab to that of the next


@dataclass(frozen=True)
class SectionRows:
    """Rule for rows in another order than in the parameter, section after section; a rank has a run of units."""

    units: int  # number of units, a multiple of the ranks on the axis
    sections: tuple[Section, ...]  # sections in the order of the parameter
    # Order of the slabs: True: all sections of a unit, then the next unit. False: all units of a section first.
    unit_major: bool = False

    def __call__(self, tensors: tuple[TensorSpec, ...], rank: int, size: int) -> Shard:
        """Returns the shard; all tensors have the same dimensions after the first."""
        units = range(rank * self.units // size, (rank + 1) * self.units // size)
        if self.unit_major:
            slabs = [(section, unit) for unit in units for section in self.sections]
        else:
            slabs = [(section, unit) for section in self.sections for unit in units]
        return _join([
            (tensors[section.tensor], start := section.start + unit * section.stride, start + section.rows)
            for section, unit in slabs
        ])  # fmt: skip


@dataclass(frozen=True)
class HeadRows:
    """Rule for rows of heads: a slab of each tensor; `size / kv_heads` neighbours share one of a key-value head."""

    kv_heads: int  # key-value heads of a layer
    of_queries: int = 1  # tensors of queries, of which each rank has heads; the others are keys and values

    def __call__(self, tensors: tuple[TensorSpec, ...], rank: int, size: int) -> Shard:
        """Returns the shard, a slab of each tensor."""
        parts = min(size, self.kv_heads)  # more ranks than heads: neighbours repeat a slab
        queries = [(tensor, size, rank) for tensor in tensors[: self.of_queries]]
        return _concatenate(queries + [(t, parts, rank * parts // size) for t in tensors[self.of_queries :]])


@dataclass(frozen=True)
class VocabularyRows:
    """Rule that splits the rows of a vocabulary, padded after the last token."""

    multiple: int  # the padded number of rows is a multiple of this
    on_each_rank: bool = True
    """Whether the multiple applies to the rows of each rank (Megatron), or of all ranks together (engines)."""

    def __call__(self, tensors: tuple[TensorSpec, ...], rank: int, size: int) -> Shard:
        """Returns the shard; a rank that begins after the last token has padding only."""
        (tensor,) = tensors
        vocab, rest = tensor.shape[0], full_box(tensor.shape[1:])
        height = self.padded(vocab, size) // size
        start, stop = min(rank * height, vocab), min((rank + 1) * height, vocab)
        real = stop - start
        pieces = (Piece(tensor.name, ((start, stop), *rest), ((0, real), *rest)),) if real else ()
        padding = (((real, height), *rest),) if real < height else ()
        return Shard((height, *tensor.shape[1:]), pieces, padding)

    def padded(self, vocab: int, size: int) -> int:
        """Returns the rows on all ranks together, including padding."""
        over_all = -(-vocab // self.multiple) * self.multiple
        # As SGLang does where the ranks do not divide the padded rows; vLLM refuses such a layout.
        if not self.on_each_rank and over_all % size == 0:
            return over_all
        return -(-vocab // (size * self.multiple)) * size * self.multiple


# Compared by identity: shard maps have it as a key, and equal rows of different layers are one object.
@dataclass(frozen=True, eq=False)
class ParamRow:
    """One row of a runtime's table: a parameter, its Hugging Face tensors, and how they are sharded.

    For tensors of experts, a name with `{expert}` means one parameter for each local expert; a name without it means
    one parameter that stacks all local experts along a new first dimension.
    """

    name: str  # name of the parameter below the prefix of its block
    tensors: tuple[TensorSpec, ...]  # the Hugging Face tensors that the parameter consists of
    rule: ShardRule = replicate  # function that gives the shard of each rank on the axis
    axis: Axis = "replicated"  # the parallel axis that shards the parameter
    order: Order = ()  # the parameter's dimensions in the order of its tensors', with that of a stack

    @property
    def per_expert(self) -> bool:
        """Whether the tensors belong to experts."""
        return self.tensors[0].per_expert

    @property
    def stacked(self) -> bool:
        """Whether the parameter stacks all local experts."""
        return self.per_expert and "{expert}" not in self.name


@dataclass(frozen=True)
class ParamBlock:
    """Parameters with a common prefix."""

    prefix: str  # prefix of the parameters' names, such as `decoder.layers.0.`
    params: tuple[ParamRow, ...]  # the parameters of the block
    # Global index of the transformer layer; None outside the layers.
    layer: int | None = None


def optional_param(
    name: str, tensor: TensorSpec | None, rule: ShardRule = replicate, axis: Axis = "replicated"
) -> tuple[ParamRow, ...]:
    """Returns a parameter in a tuple, or an empty tuple."""
    return (ParamRow(name, (tensor,), rule, axis),) if tensor else ()


def _concatenate(parts: list[tuple[TensorSpec, int, int]]) -> Shard:
    """Concatenates slabs along the first dimension; a part is (tensor, number of slabs, index of the slab)."""
    runs = []
    for tensor, count, index in parts:
        height = tensor.shape[0] // count
        runs.append((tensor, index * height, (index + 1) * height))
    return _join(runs)


def _join(runs: list[tuple[TensorSpec, int, int]]) -> Shard:
    """Concatenates runs of rows (tensor, start, stop); runs that are adjacent in their tensor too are one piece."""
    joined: list[tuple[TensorSpec, int, int]] = []
    for tensor, start, stop in runs:
        # Fewer pieces are fewer boxes in every plan: with one unit on a rank, the rows of a section are one run.
        if joined and joined[-1][0] is tensor and joined[-1][2] == start:
            start = joined.pop()[1]
        joined.append((tensor, start, stop))
    pieces, row = [], 0
    rest = runs[0][0].shape[1:]
    for tensor, start, stop in joined:
        height = stop - start
        pieces.append(Piece(tensor.name, ((start, stop), *full_box(rest)), ((row, row + height), *full_box(rest))))
        row += height
    return Shard((row, *rest), tuple(pieces))
