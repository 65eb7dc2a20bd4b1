"""The order of an epoch's rows: blocks are permuted, and the rows in each. Pure.

A permutation is computed entry by entry from a key, so nothing grows with the data.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    """Return a 64-bit key that each of these numbers, and their order, changes."""
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
        """Return the numbers at these positions, as an array of int64."""
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


#: Rows whose numbers are best computed together: for few at a time, each costs much more.
TOGETHER = 2**14

#: What the keys are for, so that they differ where their numbers do not.
_BLOCKS, _ROWS = 1, 2


class Span(NamedTuple):
    """Rows of a block that follow each other in an epoch's order."""

    #: Rows of the block.
    size: int
    start: int
    stop: int
    #: Of the block's permutation; None: its rows keep their order.
    key: int | None

    def numbers(self) -> Any:
        """Return the numbers of the rows: a range where they keep their order, or an array."""
        if self.key is None:
            return range(self.start, self.stop)
        return _permutation(self.size, self.key).take(np.arange(self.start, self.stop))

    def parts(self, most: int) -> Iterator[Span]:
        """Yield the same rows, so many at a time."""
        for low in range(self.start, self.stop, most):
            yield self._replace(start=low, stop=min(low + most, self.stop))


#: Those of parts of a span, of which one is read after another.
_permutation = functools.lru_cache(maxsize=4)(Permutation)


class EpochOrder:
    """Rows of all blocks, one after another, by position.

    Args:
        seed: From which the order is drawn; None keeps blocks and rows as they are.
        epoch: Each epoch has an order of its own.
    """

    def __init__(self, sizes: Sequence[int], seed: int | None, epoch: int) -> None:
        self._seed = seed
        self._epoch = epoch
        self._blocks = np.arange(len(sizes))
        if seed is not None:
            key = derive_key(seed, _BLOCKS, epoch)
            self._blocks = Permutation(len(sizes), key).take(self._blocks)
        self._ends = np.cumsum(np.asarray(sizes, dtype=np.int64)[self._blocks])

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, Span]]:
        """Yield the blocks of these positions, in order, each with which of its rows are there."""
        index = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[index])
            begin = int(self._ends[index - 1]) if index else 0
            upto = min(stop, end)
            block = int(self._blocks[index])
            if upto > start:
                key = None
                if self._seed is not None:
                    key = derive_key(self._seed, _ROWS, self._epoch, block)
                yield block, Span(end - begin, start - begin, upto - begin, key)
            start = upto
            index += 1
