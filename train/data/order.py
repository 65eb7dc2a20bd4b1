"""The order in which an epoch's rows are read. Pure.

Blocks are what a source reads at once, such as a row group. Their order is drawn, and
the order of the rows in each; a block is read once by a rank, and not kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from miniray.train.data.permutation import Permutation, derive_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Rows of a block whose numbers are computed together: for few at a time, each costs much more.
_TOGETHER = 2**14

#: What the keys are for, so that they differ where their numbers do not.
_BLOCKS, _ROWS = 1, 2


class EpochOrder:
    """Rows of all blocks, one after another, by position.

    Args:
        sizes: Rows of each block.
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
        self._inner: tuple[int, Permutation] | None = None
        self._ready: tuple[int, Any] | None = None  # a place in it, and the numbers from there

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Any]]:
        """Blocks of these positions, in order, each with the numbers of its rows.

        The numbers are a range where rows keep their order, otherwise an array.
        """
        index = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[index])
            begin = int(self._ends[index - 1]) if index else 0
            upto = min(stop, end)
            block = int(self._blocks[index])
            if upto > start:
                yield block, self._rows(block, end - begin, start - begin, upto - begin)
            start = upto
            index += 1

    def _rows(self, block: int, size: int, start: int, stop: int) -> Any:
        if self._seed is None:
            return range(start, stop)
        if self._inner is None or self._inner[0] != block:
            key = derive_key(self._seed, _ROWS, self._epoch, block)
            self._inner = block, Permutation(size, key)
            self._ready = None
        ready = self._ready
        if ready is None or start < ready[0] or stop > ready[0] + len(ready[1]):
            upto = min(size, max(stop, start + _TOGETHER))
            ready = start, self._inner[1].take(np.arange(start, upto))
            self._ready = ready
        return ready[1][start - ready[0] : stop - ready[0]]
