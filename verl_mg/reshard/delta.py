"""Lossless code of the elements of a box that have changed, with a checksum of the result; and files of such changes.

    header     four int64: kind, number of changed elements, bytes of places, checksum of the whole box
    values     the changed elements, filled to a multiple of 8 bytes
    places     which elements they are, filled to a multiple of 8 bytes

Places are the distances of changed elements, minus 1, as numbers of 7 bits a byte with a bit for "continued" (LEB128),
or a bit for each element of the box: whatever is smaller. If all values together are smaller, there are no places.
Elements are compared and copied as bits, so the code knows no rounding, no NaN and no sign of zero. The checksum is of
the box and not of the code: it also finds memory that was overwritten, and a transfer that was missed.

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
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from verl_mg.sharding.boxes import Box, Order

FORMAT = "verl_mg changes 2"  # name and number of the format; the number changes with the fields
ALIGNMENT = 8  # parts of a code begin at multiples of this number of bytes
HEADER_BYTES = 32
SLAB_ELEMENTS = 2**20  # a multiple of 8
"""Elements whose checksum is computed at a time, which bounds the memory of intermediate values."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PAYLOAD = 7  # bits of a number in each byte, as in LEB128; the eighth says that another byte follows


class Kind(IntEnum):
    """Forms of the places of changed elements."""

    UNCHANGED = 0
    DISTANCES = 1
    BITMAP = 2
    ALL = 3


@dataclass(frozen=True)
class Patch:
    """Changes of a box of a parameter."""

    parameter: str  # target parameter
    box: Box  # box in the parameter
    code: Tensor  # its changes, as `apply_delta` reads them


def encode_delta(values: Tensor, before: Tensor | None) -> Tensor:
    """Encodes the elements of a box that differ from earlier ones, as (bytes,) uint8; all of them without `before`."""
    bits = _bits(values)
    number = checksum(values)
    if before is None:
        return _code(Kind.ALL, bits.numel(), number, bits.reshape(-1), None)
    changed = (bits != _bits(before)).reshape(-1)
    count, size = int(changed.count_nonzero()), changed.numel()
    if not count:
        return _code(Kind.UNCHANGED, 0, number, None, None)
    bitmap_bytes = -(-size // 8)
    if count * bits.itemsize + min(bitmap_bytes, count) >= size * bits.itemsize:
        return _code(Kind.ALL, size, number, bits.reshape(-1), None)
    at = changed.nonzero().squeeze(1)
    changed_values = bits.reshape(-1)[at]
    if count < bitmap_bytes:  # a distance takes a byte or more
        distances = _distances(at)
        if len(distances) < bitmap_bytes:
            return _code(Kind.DISTANCES, count, number, changed_values, distances)
    return _code(Kind.BITMAP, count, number, changed_values, _bitmap(changed))


def apply_delta(code: Tensor, target: Tensor) -> bool:
    """Writes the encoded elements into a box, and returns whether it has the checksum of the sender's box then.

    If not, the elements are undefined: the code was damaged, or the box had other elements before.
    """
    kind, count, place_bytes, expected = code[:HEADER_BYTES].view(torch.int64).tolist()
    bits = _bits(target)
    value_bytes = count * bits.itemsize
    places_at = HEADER_BYTES + _aligned(value_bytes)
    # The code comes from another process or a file, so each number in it is checked before it is an index.
    sizes_fit = 0 <= count <= bits.numel() and place_bytes >= 0
    if not sizes_fit or kind not in list(Kind) or len(code) != places_at + _aligned(place_bytes):
        return False
    values = code[HEADER_BYTES : HEADER_BYTES + value_bytes].view(bits.dtype)
    if kind == Kind.ALL:
        if count != bits.numel():
            return False
        bits.copy_(values.view(bits.shape))
    elif kind != Kind.UNCHANGED:
        read = _places if kind == Kind.DISTANCES else _marked
        at = read(code[places_at : places_at + place_bytes])
        if len(at) != count or not count or int(at.max()) >= bits.numel() or int(at.min()) < 0:
            return False
        bits[torch.unravel_index(at, bits.shape)] = values
    return checksum(target) == expected


def checksum(values: Tensor) -> int:
    """Returns a number of 64 bits from the bits and places of all elements; a single change always changes it."""
    # It is a sum modulo 2**64 over words of 8 bytes, each multiplied by an odd number of its place and mixed, which
    # loses nothing of a word.
    # On the device and in whole words: a CRC of `zlib` would need the values on the host. An odd factor and an XOR with
    # the upper half can be inverted, so words that differ stay different until the sum.
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    start = 1
    for slab in _slabs(_bits(values)):
        content = slab.contiguous().view(torch.uint8)
        words = torch.nn.functional.pad(content, (0, -len(content) % 8)).view(torch.int64)
        mixed = torch.arange(start, start + len(words), device=slab.device)
        mixed = mixed.mul_(-0x61C8864680B583EB).bitwise_or_(1).mul_(words)  # 2**64 over the golden ratio, signed
        total += (mixed >> 32).bitwise_xor_(mixed).mul_(-0x40A7B892E31B1A47).sum()
        start += len(words)
    return int(total)


def _slabs(bits: Tensor) -> Iterator[Tensor]:
    """Yields all elements in order, some of them at a time; all but the last are whole words of 8 bytes."""
    if bits.is_contiguous() or bits.dim() == 1:
        yield from bits.reshape(-1).split(SLAB_ELEMENTS)
        return
    rows = -(-SLAB_ELEMENTS // 8 // max(1, math.prod(bits.shape[1:]))) * 8
    for part in bits.split(rows):
        yield part.reshape(-1)


def _bits(values: Tensor) -> Tensor:
    # Views as integers, for which NaN equals itself and 0 differs from -0.
    return values.view(_BITS[values.dtype.itemsize])


def _code(kind: Kind, count: int, number: int, values: Tensor | None, places: Tensor | None) -> Tensor:
    parts = [part for part in (values, places) if part is not None]
    device = parts[0].device if parts else torch.device("cpu")
    place_bytes = len(places) if places is not None else 0
    header = torch.tensor([kind, count, place_bytes, number], dtype=torch.int64).to(device).view(torch.uint8)
    pieces = [header]
    for part in parts:
        content = part.contiguous().view(torch.uint8)
        pieces += [content, content.new_zeros(_aligned(len(content)) - len(content))]
    return torch.cat(pieces)


def _distances(at: Tensor) -> Tensor:
    # Each step of the loops is over all places together: one for each byte of the longest distance.
    gaps = at - torch.cat([at.new_full((1,), -1), at[:-1]]) - 1
    lengths = torch.ones_like(gaps)
    limit = 1 << _PAYLOAD
    largest = int(gaps.max())
    while limit <= largest:
        lengths += gaps >= limit
        limit <<= _PAYLOAD
    ends = lengths.cumsum(0)
    result = torch.zeros(int(ends[-1]), dtype=torch.uint8, device=at.device)
    for number in range(int(lengths.max())):
        has = lengths > number
        digit = (gaps[has] >> (_PAYLOAD * number)) & 0x7F
        continued = (lengths[has] > number + 1).long() << _PAYLOAD
        result[(ends - lengths)[has] + number] = (digit | continued).to(torch.uint8)
    return result


def _places(code: Tensor) -> Tensor:
    """Returns the places that `_distances` has encoded; none for a code that is cut off."""
    is_last = code < 0x80
    if not len(code) or not bool(is_last[-1]):
        return code.new_zeros(0, dtype=torch.int64)
    ends = is_last.nonzero().squeeze(1)
    number = is_last.cumsum(0) - is_last.long()
    starts = torch.cat([ends.new_zeros(1), ends[:-1] + 1])
    digit = torch.arange(len(code), device=code.device) - starts[number]
    gaps = torch.zeros(len(ends), dtype=torch.int64, device=code.device)
    # A damaged code may have numbers of any length. Shifts by 64 bits are undefined; `apply_delta` checks the result.
    gaps.index_add_(0, number, (code & 0x7F).long() << (_PAYLOAD * digit).clamp(max=56))
    return (gaps + 1).cumsum(0) - 1


def _bitmap(changed: Tensor) -> Tensor:
    """Returns a bit for each element, the first in the lowest bit."""
    filled = torch.nn.functional.pad(changed, (0, -len(changed) % 8)).view(-1, 8)
    weights = torch.arange(8, dtype=torch.uint8, device=changed.device)
    return (filled.to(torch.uint8) << weights).sum(1, dtype=torch.uint8)


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
