"""Blanks in a library what one GPU never loads, so that it compresses to a fraction and is loaded as before.

Blanked are the programs for other architectures in its fat binaries, and symbol tables and sections that only debuggers
read. Sizes, headers and offsets stay. A fat binary is a container (magic number, size of its header and of the rest) of
entries: a header (kind, sizes, architecture) and a payload, which is PTX or a program (ELF), compressed or not.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

CONTAINER_MAGIC, PTX, PROGRAM = 0xBA55ED50, 1, 2
FAT_BINARIES = (".nv_fatbin", "__nv_relfatbin")
FOR_DEBUGGERS = (".debug_", ".symtab", ".strtab")
NO_CONTENT, IS_LOADED = 8, 2
"""Type and flag of a section: SHT_NOBITS, SHF_ALLOC."""


class Section(NamedTuple):
    name: str
    is_loaded: bool
    start: int
    size: int


class Entry(NamedTuple):
    """One payload of a fat binary."""

    kind: int
    architecture: int
    start: int
    size: int


def blanked(library: bytes, architecture: int) -> bytes:
    """The library without what a GPU of `architecture` (90: Hopper) never loads; any other file as it is."""
    result = bytearray(library)
    for start, size in _never_loaded(library, architecture):
        result[start : start + size] = bytes(size)
    return bytes(result)


def _never_loaded(library: bytes, architecture: int) -> Iterator[tuple[int, int]]:
    for section in sections(library):
        if section.name in FAT_BINARIES:
            for entries in containers(library, section):
                kept = _for_architecture(entries, architecture)
                yield from ((entry.start, entry.size) for entry in entries if entry not in kept)
        elif section.name.startswith(FOR_DEBUGGERS) and not section.is_loaded:
            yield section.start, section.size


def _for_architecture(entries: list[Entry], architecture: int) -> list[Entry]:
    """Its programs; where there are none, the newest PTX that the driver can compile for it."""
    programs = [entry for entry in entries if entry.kind == PROGRAM and entry.architecture == architecture]
    ptx = [entry for entry in entries if entry.kind == PTX and entry.architecture <= architecture]
    return programs or sorted(ptx, key=lambda entry: entry.architecture)[-1:]


def sections(library: bytes) -> Iterator[Section]:
    """Sections with content of a 64-bit ELF file."""
    if not library.startswith(b"\x7fELF\x02\x01"):
        return
    (table,) = struct.unpack_from("<Q", library, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", library, 58)
    headers = [struct.unpack_from("<IIQQQQ", library, table + index * entry_size) for index in range(count)]
    for name, kind, flags, _, start, size in headers:
        names = headers[names_index][4]
        # The names themselves may be in .strtab, and stay.
        if kind != NO_CONTENT and start != names:
            end = library.index(b"\0", names + name)
            yield Section(library[names + name : end].decode(), bool(flags & IS_LOADED), start, size)


def containers(library: bytes, section: Section) -> Iterator[list[Entry]]:
    """The entries of each container of a section."""
    at, end = section.start, section.start + section.size
    while at + 16 <= end:
        magic, _, header, size = struct.unpack_from("<IHHQ", library, at)
        if magic == CONTAINER_MAGIC:
            yield list(_entries(library, at + header, at + header + size))
            at += header + size
        # Containers begin at multiples of 8 bytes, possibly after padding.
        at = at // 8 * 8 + 8 if magic != CONTAINER_MAGIC else (at + 7) // 8 * 8


def _entries(library: bytes, at: int, end: int) -> Iterator[Entry]:
    while at + 64 <= end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
        if kind not in (PTX, PROGRAM):
            return
        yield Entry(kind, struct.unpack_from("<I", library, at + 28)[0], at + header, size)
        at += header + size
