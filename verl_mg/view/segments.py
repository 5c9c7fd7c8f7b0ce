"""Segments of the index: rows and texts of some iterations, searchable by number and by text.

    SEGMENT/rows.arrow        the columns of the rows; mapped into memory, never read as a whole
    SEGMENT/texts.arrow       their texts in lower case, a compressed batch per block of rows
    SEGMENT/signatures.npy    the n-grams of each block, see `signatures`

A segment is written once and never changed: under a temporary name, then renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl_mg.view.rows import TEXT

FORMAT = "1"  # version of the files; a segment of another one is built again
BLOCK_BYTES = 2**14  # text of a block, at least; the last one of a segment may have less

_ROWS, _TEXTS, _SIGNATURES = "rows.arrow", "texts.arrow", "signatures.npy"
_METADATA = b"verl_mg.view"
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
_SERIAL = pa.ipc.IpcReadOptions(use_threads=False)

Versions = Mapping[int, int]  # version of each iteration's folder, see `index.IterationFolders`
SIZES = (3, 5)
"""Bytes of the n-grams. Long ones distinguish texts of common syllables, short ones are for short texts."""
HASH_BITS = 15
"""Logarithm of the number of bits per block: 4 KB for a block of 16 KB, which sets about a fourth of them."""
# Odd constants of multiplicative hashing (Knuth, The Art of Computer Programming 3, section 6.4).
_FACTORS = tuple(np.uint32(factor) for factor in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1))


class Segment:
    """Rows of some iterations in the order of iteration, call and sample id; in memory without `signatures`."""

    def __init__(
        self,
        versions: Versions,
        rows: pa.Table,
        texts: Sequence[pa.Array] | pa.RecordBatchFileReader,
        block_ends: Sequence[int],
        signatures: np.ndarray | None = None,
    ) -> None:
        self.versions, self.rows = dict(versions), rows
        self.first, self.last = min(versions), max(versions)
        self._texts, self._block_ends, self._signatures = texts, block_ends, signatures

    @classmethod
    def of(cls, versions: Versions, table: pa.Table) -> Segment:
        """Returns a segment in memory; `table` has the columns `rows.INDEXED`."""
        # One chunk each, so that a column is a NumPy array without a copy.
        table = table.unify_dictionaries().combine_chunks()
        texts = table[TEXT].combine_chunks()
        ends = _block_ends(texts)
        blocks = [texts.slice(begin, end - begin) for begin, end in pairwise([0, *ends])]
        return cls(versions, table.drop_columns(TEXT), blocks, ends)

    @classmethod
    def open(cls, folder: Path) -> Segment:
        """Opens a segment; OSError, ValueError or ArrowException where it is damaged or of another format."""
        rows = pa.ipc.open_file(pa.memory_map(str(folder / _ROWS))).read_all()
        about = json.loads(rows.schema.metadata[_METADATA])
        if about["format"] != FORMAT:
            raise ValueError(f"format {about['format']}")
        versions = {int(iteration): version for iteration, version in about["versions"].items()}
        texts = pa.ipc.open_file(pa.memory_map(str(folder / _TEXTS)), options=_SERIAL)
        signatures = np.load(folder / _SIGNATURES, mmap_mode="r", allow_pickle=False)
        return cls(versions, rows, texts, about["block_ends"], signatures)

    def write(self, folder: Path) -> Path:
        """Writes a segment that is in memory into the folder of an index; returns its own folder."""
        versions = {str(iteration): version for iteration, version in self.versions.items()}
        about = {"format": FORMAT, "versions": versions, "block_ends": list(self._block_ends)}
        # With a version in its name: a segment of a replaced iteration is another folder, not a changed one.
        target = folder / f"{self.first:06d}-{self.last:06d}-{max(self.versions.values()):x}"
        partial = folder / f".{target.name}.partial"
        for leftover in (partial, target):  # of a builder that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        rows = self.rows.replace_schema_metadata({_METADATA: json.dumps(about).encode()})
        with pa.OSFile(str(partial / _ROWS), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
            writer.write_table(rows)
        schema = pa.schema([(TEXT, pa.string())])
        blocks = [self._block(number) for number in range(len(self._block_ends))]
        with (
            pa.OSFile(str(partial / _TEXTS), "wb") as sink,
            pa.ipc.new_file(sink, schema, options=_COMPRESSED) as writer,
        ):
            for block in blocks:
                writer.write_batch(pa.record_batch([block], schema=schema))
        np.save(partial / _SIGNATURES, sign(_content(block)[0] for block in blocks), allow_pickle=False)
        os.rename(partial, target)
        return target

    def __len__(self) -> int:
        return self.rows.num_rows

    def column(self, name: str) -> np.ndarray:
        """Returns the numbers of a column, without a copy; for names their places in `names`, -1 for none."""
        column = self.rows[name]
        chunk = column.chunk(0) if column.num_chunks else pa.array([], column.type)
        if pa.types.is_dictionary(chunk.type):
            chunk = pc.fill_null(chunk.indices, -1)
        values: np.ndarray = chunk.to_numpy(zero_copy_only=False)
        return values

    def names(self, name: str) -> list[str]:
        """Returns the different texts of a column of names."""
        column = self.rows[name]
        return list(column.chunk(0).dictionary.to_pylist()) if column.num_chunks else []

    def text_bytes(self) -> int:
        """Returns the size of its texts, by the number of blocks."""
        return len(self._block_ends) * BLOCK_BYTES

    def table(self) -> pa.Table:
        """Returns all rows with the columns `rows.INDEXED`."""
        texts = pa.chunked_array([self._block(number) for number in range(len(self._block_ends))], pa.string())
        return self.rows.append_column(TEXT, texts)

    def blocks_with(self, terms: Sequence[bytes], rows: np.ndarray | None) -> np.ndarray:
        """Returns the blocks that may contain all terms, in lower case, and at least one of `rows` (in order)."""
        ends = np.asarray(self._block_ends)
        possible = np.ones(len(ends), bool)
        if self._signatures is not None:
            for term in terms:
                possible &= candidates(self._signatures, term)[: len(ends)]
        if rows is not None:
            begins = np.concatenate([[0], ends[:-1]])
            possible &= np.searchsorted(rows, begins) < np.searchsorted(rows, ends)
        return np.flatnonzero(possible)

    def rows_with(self, block: int, terms: Sequence[bytes]) -> list[int]:
        """Returns the rows of a block whose text contains all terms."""
        content, ends = _content(self._block(block))
        first = self._block_ends[block - 1] if block else 0
        hits: set[int] | None = None
        for term in terms:
            current = set(_rows_with(content, ends, term))
            hits = current if hits is None else hits & current
        return sorted(first + row for row in hits or ())

    def _block(self, number: int) -> pa.Array:
        if isinstance(self._texts, Sequence):
            return self._texts[number]
        return self._texts.get_batch(number).column(0)


def _rows_with(content: bytes, ends: Sequence[int], term: bytes) -> Iterator[int]:
    """Yields the texts with a term, of texts that follow each other and have these ends."""
    # A hit that crosses the end of a text is in neither of the two.
    place = content.find(term)
    while place >= 0:
        row = bisect_right(ends, place)
        if place + len(term) <= ends[row]:
            yield row
            place = content.find(term, ends[row])
        else:
            place = content.find(term, place + 1)


def _block_ends(texts: pa.Array) -> list[int]:
    """Returns the end of each block of texts, in rows."""
    sizes = pc.binary_length(texts).to_numpy(zero_copy_only=False) if len(texts) else np.zeros(0, np.int64)
    total = np.cumsum(sizes, dtype=np.int64)
    ends: list[int] = []
    reached = 0
    while reached < len(total):
        before = total[reached - 1] if reached else 0
        reached = min(int(np.searchsorted(total, before + BLOCK_BYTES)) + 1, len(total))
        ends.append(reached)
    return ends


def _content(texts: pa.Array) -> tuple[bytes, list[int]]:
    """Returns the bytes of texts one after another, and the end of each."""
    _, offsets, data = texts.buffers()
    if data is None:
        return b"", [0] * len(texts)
    bounds = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return memoryview(data)[bounds[0] : bounds[-1]].tobytes(), (bounds[1:] - bounds[0]).tolist()


def sign(blocks: Iterable[bytes]) -> np.ndarray:
    """Returns the signatures of blocks, (2 ** HASH_BITS, ceil(blocks / 8)) uint8."""
    # Row `h` has a bit per block, set where an n-gram of the block has the hash `h`, as `numpy.packbits` orders them:
    # of 10 blocks the last two are the bits 128 and 64 of the second byte.
    rows: list[np.ndarray] = []
    for number, block in enumerate(blocks):
        if number % 8 == 0:  # a byte of each hash for the next 8 blocks
            rows.append(np.zeros(2**HASH_BITS, np.uint8))
        for size in SIZES:
            rows[-1][_hashes(np.frombuffer(block, np.uint8), size)] |= np.uint8(128 >> number % 8)
    stacked = np.stack(rows) if rows else np.zeros((0, 2**HASH_BITS), np.uint8)
    return np.ascontiguousarray(stacked.T)


def candidates(signatures: np.ndarray, text: bytes) -> np.ndarray:
    """Returns which blocks may contain a text, (blocks, rounded up to a multiple of 8) bool."""
    # A text of fewer than three bytes has no n-gram, so all may.
    data = np.frombuffer(text, np.uint8)
    hashes = np.unique(np.concatenate([_hashes(data, size) for size in SIZES]))
    every = np.full(signatures.shape[1], 255, np.uint8)
    for number in hashes.tolist():
        every &= signatures[number]
        if not every.any():
            break
    return np.unpackbits(every).astype(bool)


def _hashes(data: np.ndarray, size: int) -> np.ndarray:
    """Returns the hash of each n-gram; none for a text that is shorter."""
    count = len(data) - size + 1
    if count <= 0:
        return np.zeros(0, np.uint32)
    mixed = np.zeros(count, np.uint32)
    for place in range(size):
        mixed += data[place : place + count] * _FACTORS[place]
    mixed ^= mixed >> np.uint32(15)
    mixed *= _FACTORS[0]
    return mixed >> np.uint32(32 - HASH_BITS)
