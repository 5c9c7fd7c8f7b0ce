"""Lossless code of the elements of a box that have changed, with checksums of the result; and files of such changes.

A box is encoded slab by slab: as many whole rows as have at most SLAB_ELEMENTS, parts of a row where it has more. So
memory for intermediate values is that of a slab, whatever the box. Each slab has

    header     four int64: kind, number of changed elements, bytes of places, checksum of the whole slab
    values     the changed elements, filled to a multiple of 8 bytes
    places     which elements they are, filled to a multiple of 8 bytes

Places are the numbers of unchanged elements between changed ones, in uint8 or int16, whose largest number stands for as
many elements of which none is changed; or a bit for each element of the slab, where this is smaller. If all values
together are smaller, there are no places.
Elements are compared and copied as bits, so the code knows no rounding, no NaN and no sign of zero. The checksum is of
the slab and not of the code: it also finds memory that was overwritten, and a transfer that was missed.

    64 elements in bfloat16, of which number 2 is now 9 and number 40 is now 1:

    header    DISTANCES, 2, 2, checksum
    values    9, 1 (4 bytes, filled to 8)
    places    2, 37 (2 bytes, filled to 8)        40 - 2 - 1 = 37

Ranks of a server read their changes from files. A file is a safetensors file of one sender with one tensor, `codes`
(bytes,) uint8: codes as `encode_delta` returns them, one after the other. Its metadata has two JSON objects, each by
member LAYOUT/RANK, such as "tp2/1":

    places    for each box of the member: [parameter, [[begin, end], ...], first byte, bytes]
    dtypes    the dtype of each of these parameters
    orders    dimensions of these parameters in the order that boxes have, where it is not the parameter's own

A box that several members need is in the file once.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from verl_mg.sharding.boxes import Box, Order

FORMAT = "verl_mg changes 3"  # name and number of the format; the number changes with the fields
ALIGNMENT = 8  # parts of a code begin at multiples of this number of bytes
HEADER_BYTES = 32
SLAB_ELEMENTS = 2**20
"""Elements of a slab, which bounds the memory of intermediate values."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FAR = 400
"""Mean distance from which int16 needs fewer bytes than uint8."""


class Kind(IntEnum):
    """Forms of the places of changed elements."""

    UNCHANGED = 0
    DISTANCES = 1
    BITMAP = 2
    ALL = 3
    FAR_DISTANCES = 4


_DISTANCES = {Kind.DISTANCES: torch.uint8, Kind.FAR_DISTANCES: torch.int16}


@dataclass(frozen=True)
class Patch:
    """Changes of a box of a parameter."""

    parameter: str  # target parameter
    box: Box  # box in the parameter
    code: Tensor  # its changes, as `apply_delta` reads them


def encode_delta(values: Tensor, kept: Tensor | None) -> Tensor:
    """Encodes the elements of a box that differ from `kept`, which has them then, as (bytes,) uint8; all without it."""
    bits, parts = _bits(values), []
    factors = _factors(bits)
    before = repeat(None) if kept is None else _slabs(_bits(kept))
    for slab, held in zip(_slabs(bits), before, strict=False):
        parts += _encode_slab(slab, held, factors)
    return torch.cat(parts)


def apply_delta(code: Tensor, target: Tensor) -> bool:
    """Writes the encoded elements into a box, and returns whether it has the checksums of the sender's box then.

    If not, the elements are undefined: the code was damaged, or the box had other elements before.
    """
    bits = _bits(target)
    factors = _factors(bits)
    for slab in _slabs(bits):
        size = _apply_slab(code, slab, factors)
        if not size:
            return False
        code = code[size:]
    return not len(code)


def _encode_slab(bits: Tensor, kept: Tensor | None, factors: Tensor) -> list[Tensor]:
    words = _words(bits)
    number = _checksum(words, factors)
    if kept is None:
        return _code(Kind.ALL, number, _flat(bits))
    # Words of several elements are compared first: few of them differ.
    before = _words(kept.to(bits.device))
    differ = (words != before).nonzero().squeeze(1)
    if not len(differ):
        return _code(Kind.UNCHANGED, number, bits.new_empty(0))
    # `index_select` and `scatter_` take a third of the seconds of indices in brackets.
    new = words.index_select(0, differ).view(bits.dtype)
    inner = (new != before.index_select(0, differ).view(bits.dtype)).nonzero().squeeze(1)
    kept.copy_(bits)
    count, size, bitmap_bytes = len(inner), bits.numel(), -(-bits.numel() // 8)
    if count * bits.itemsize + min(bitmap_bytes, count) >= size * bits.itemsize:
        return _code(Kind.ALL, number, _flat(bits))
    shift = (8 // bits.itemsize).bit_length() - 1
    at = (differ.index_select(0, inner >> shift) << shift) + (inner & (1 << shift) - 1)
    changed_values = new.index_select(0, inner)
    if count < bitmap_bytes:  # a distance takes a byte or more
        kind = Kind.FAR_DISTANCES if count * _FAR < size else Kind.DISTANCES
        distances = _distances(at, _DISTANCES[kind])
        if distances.nbytes < bitmap_bytes:
            return _code(kind, number, changed_values, distances)
    changed = torch.zeros(size, dtype=torch.bool, device=bits.device).scatter_(0, at, value=True)
    return _code(Kind.BITMAP, number, changed_values, _bitmap(changed))


def _apply_slab(code: Tensor, bits: Tensor, factors: Tensor) -> int:
    """Applies the code of a slab, at the begin of `code`; returns its bytes, 0 where slab or code are damaged."""
    if len(code) < HEADER_BYTES:
        return 0
    kind, count, place_bytes, expected = code[:HEADER_BYTES].view(torch.int64).tolist()
    # The code comes from another process or a file, so each number in it is checked before it is an index.
    if not 0 <= count <= bits.numel() or place_bytes < 0 or kind not in list(Kind):
        return 0
    value_bytes = count * bits.itemsize
    places_at = HEADER_BYTES + _aligned(value_bytes)
    end = places_at + _aligned(place_bytes)
    if len(code) < end:
        return 0
    values = code[HEADER_BYTES : HEADER_BYTES + value_bytes].view(bits.dtype)
    if kind == Kind.ALL:
        if count != bits.numel():
            return 0
        bits.copy_(values.view(bits.shape))
    elif kind != Kind.UNCHANGED:
        places = code[places_at : places_at + place_bytes]
        at = _marked(places) if kind == Kind.BITMAP else _places(places, _DISTANCES[Kind(kind)])
        if len(at) != count or not count or int(at.max()) >= bits.numel() or int(at.min()) < 0:
            return 0
        if bits.is_contiguous():
            bits.view(-1).scatter_(0, at, values)
        else:
            bits[torch.unravel_index(at, bits.shape)] = values
    return end if _checksum(_words(bits), factors) == expected else 0


def _factors(bits: Tensor) -> Tensor:
    """Returns an odd number for each word of 8 bytes of the largest slab."""
    words = -(-min(bits.numel(), SLAB_ELEMENTS) * bits.itemsize // 8)
    # An odd number times 2**64 over the golden ratio, signed.
    return torch.arange(1, 2 * words, 2, device=bits.device).mul_(-0x61C8864680B583EB)


def _checksum(words: Tensor, factors: Tensor) -> int:
    """Returns a number of 64 bits from the bits and places of all words."""
    # On the device and in whole words: a CRC of `zlib` would need the values on the host. An odd factor can be
    # inverted, so words that differ stay different; the shift, with copies of the sign, takes upper bits to the others.
    mixed = words * factors[: len(words)]
    return int(mixed.bitwise_xor_(mixed >> 32).sum())


def _slabs(bits: Tensor) -> Iterator[Tensor]:
    """Cuts a box into slabs, by its shape and whatever its strides are."""
    if bits.numel() <= SLAB_ELEMENTS:
        yield bits
        return
    row = math.prod(bits.shape[1:])
    for part in bits.split(SLAB_ELEMENTS // row) if row <= SLAB_ELEMENTS else bits:
        yield from _slabs(part)


def _words(bits: Tensor) -> Tensor:
    """Returns all elements in order as words of 8 bytes, filled with zeros."""
    flat = _flat(bits)
    if flat.nbytes % 8 or flat.storage_offset() * flat.itemsize % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.nbytes % 8 // flat.itemsize))
    return flat.view(torch.int64)


def _flat(bits: Tensor) -> Tensor:
    return bits.reshape(-1).contiguous()  # a column of a transposed parameter is reshaped without a copy


def _bits(values: Tensor) -> Tensor:
    # Views as integers, for which NaN equals itself and 0 differs from -0.
    return values.view(_BITS[values.dtype.itemsize])


def _code(kind: Kind, number: int, values: Tensor, places: Tensor | None = None) -> list[Tensor]:
    places = values.new_empty(0, dtype=torch.uint8) if places is None else places
    header = torch.tensor([kind, len(values), places.nbytes, number], dtype=torch.int64).to(values.device)
    result = [header.view(torch.uint8)]
    for part in (values, places):
        content = part.view(torch.uint8)
        result += [content, content.new_zeros(-len(content) % ALIGNMENT)]
    return result


def _distances(at: Tensor, dtype: torch.dtype) -> Tensor:
    gaps, largest = at.diff(prepend=at.new_full((1,), -1)) - 1, torch.iinfo(dtype).max
    skipped = gaps // largest
    ends = (skipped + 1).cumsum(0) - 1
    result = torch.full((int(ends[-1]) + 1,), largest, dtype=dtype, device=at.device)
    return result.scatter_(0, ends, (gaps - skipped * largest).to(dtype))


def _places(code: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the places that `_distances` has encoded; others for a damaged code."""
    gaps = code[: len(code) // dtype.itemsize * dtype.itemsize].view(dtype)
    is_end = gaps != torch.iinfo(dtype).max
    return (gaps.long() + is_end).cumsum_(0).index_select(0, is_end.nonzero().squeeze(1)) - 1


def _bitmap(changed: Tensor) -> Tensor:
    """Returns a bit for each element, the first in the lowest bit."""
    filled = torch.nn.functional.pad(changed, (0, -len(changed) % 8)).view(torch.int64)
    # Bit n of the highest byte of the product is byte n, which is 0 or 1.
    return ((filled * 0x0102040810204080 >> 56) & 0xFF).to(torch.uint8)


def _marked(code: Tensor) -> Tensor:
    bits = (code[:, None] >> torch.arange(8, dtype=torch.uint8, device=code.device)) & 1
    return bits.view(-1).nonzero().squeeze(1)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Place:
    """A box of a parameter of a member."""

    member: str  # layout and rank of the member
    parameter: str
    box: Box  # box in the parameter
    dtype: torch.dtype  # dtype of the parameter
    order: Order = ()  # its dimensions in the order that the box has


def member_name(layout: str, rank: int) -> str:
    """Returns the name of a rank of all servers of a layout, which all read the same: such as "tp2/1"."""
    return f"{layout}/{rank}"


def write_changes(path: Path, changes: Iterable[tuple[Tensor, Sequence[Place]]]) -> int:
    """Writes codes, each with the places of its box; returns the bytes of the file."""
    codes: list[Tensor] = []
    places: dict[str, list[tuple[str, Box, int, int]]] = defaultdict(list)
    dtypes: dict[str, dict[str, str]] = defaultdict(dict)
    orders: dict[str, dict[str, Order]] = defaultdict(dict)
    end = 0
    for code, wanted in changes:
        codes.append(code.cpu())
        for place in wanted:
            places[place.member].append((place.parameter, place.box, end, len(code)))
            dtypes[place.member][place.parameter] = str(place.dtype).removeprefix("torch.")
            if place.order:
                orders[place.member][place.parameter] = place.order
        end += len(code)
    content = torch.cat(codes) if codes else torch.zeros(0, dtype=torch.uint8)
    by_member = {"places": places, "dtypes": dtypes, "orders": orders}
    metadata = {"format": FORMAT} | {key: json.dumps(value) for key, value in by_member.items()}
    save_file({"codes": content}, path, metadata)
    return path.stat().st_size


@contextmanager
def open_changes(path: Path, member: str) -> Iterator[ChangesFile]:
    """Context manager: opens a file of changes for a member; ValueError for a file of another format."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} has the format {metadata.get('format')}, this version of verl_mg reads {FORMAT}")
        yield ChangesFile(file, metadata, member)


class ChangesFile:
    """The changes of one sender for one member, in an open file."""

    def __init__(self, file: Any, metadata: Mapping[str, str], member: str) -> None:
        self._file = file
        self._places = json.loads(metadata["places"]).get(member, [])
        self.dtypes: Mapping[str, str] = json.loads(metadata["dtypes"]).get(member, {})
        """Dtypes of the member's parameters that are changed."""
        self.orders: Mapping[str, Order] = json.loads(metadata["orders"]).get(member, {})
        self.nbytes = sum(size for *_, size in self._places)  # bytes of the member's codes

    def patches(self, device: torch.device) -> Iterator[Patch]:
        """Yields the changes of the member's boxes, with codes on the device; only these are read."""
        codes = self._file.get_slice("codes")
        for parameter, box, start, size in self._places:
            yield Patch(parameter, tuple((begin, end) for begin, end in box), codes[start : start + size].to(device))
