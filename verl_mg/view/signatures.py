"""Signatures of blocks of text: which short byte sequences (n-grams) occur in a block, as bits of a hash.

A block that contains a text has all n-grams of it, so only blocks with all their bits have to be read. The bits are
stored gram by gram (bit-sliced), so that a search reads one bit per block and n-gram of its text. The idea is that of
signature files: Faloutsos and Christodoulakis 1984, https://doi.org/10.1145/2275.357411.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

SIZES = (3, 5)
"""Bytes of the n-grams. Long ones distinguish texts of common syllables, short ones are for short texts."""
HASH_BITS = 15
"""Logarithm of the number of bits per block: 4 KB for a block of 16 KB, which sets about a fourth of them."""

# Odd constants of multiplicative hashing (Knuth, The Art of Computer Programming 3, section 6.4).
_FACTORS = tuple(np.uint32(factor) for factor in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1))


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
