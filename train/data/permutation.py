"""Orders of numbers that are computed entry by entry, from a key.

Pure. The order depends on size and key only, not on the version of any library, and
takes no memory that grows with a large size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: Up to this size the whole order is made at once.
_SMALL = 2**16
_ROUNDS = 6
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(values: Any) -> Any:
    """Scramble 64-bit numbers, each to another one.

    The finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, OOPSLA 2014).

    Args:
        values: An array of dtype uint64.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def derive_key(*numbers: int) -> int:
    """A 64-bit key that each of these numbers, and their order, changes."""
    key: Any = np.zeros(1, np.uint64)
    for number in numbers:
        key = mix(key + np.uint64(_GOLDEN) + np.full(1, number & _MASK, np.uint64))
    return int(key[0])


class Permutation:
    """An order of ``0 .. size - 1``.

    A small one is sorted by a hash. A large one is a Feistel network over the next power of 4,
    repeated on what falls outside (Black, Rogaway: Ciphers with Arbitrary Finite Domains,
    CT-RSA 2002).

    Args:
        size: How many numbers.
        key: Which order, as 64 bits.
    """

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        self._order: Any = None
        if size <= _SMALL:
            hashes = mix(np.arange(size, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key))
            self._order = np.argsort(hashes, kind="stable").astype(np.int64)
            return
        self._half = np.uint64(((size - 1).bit_length() + 1) // 2)
        self._mask = np.uint64(2 ** int(self._half) - 1)
        self._keys = [np.uint64(derive_key(key, step)) for step in range(_ROUNDS)]

    def take(self, positions: Any) -> Any:
        """The numbers at these positions, as an array of int64."""
        if self._order is not None:
            return self._order[positions]
        values = self._shuffle(np.asarray(positions, dtype=np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._shuffle(values[outside])
        return values.astype(np.int64)

    def _shuffle(self, values: Any) -> Any:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (mix(right + key) & self._mask)
        return (left << self._half) | right
