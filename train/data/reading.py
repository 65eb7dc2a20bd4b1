"""Reads a rank's rows of an epoch, by their place in its part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.train.data.permutation import Permutation, derive_key
from miniray.train.data.split import part, size_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from miniray.train.data.order import EpochOrder
    from miniray.train.data.sources import Rows, Source, StreamSource
    from miniray.train.data.split import Range


class PartReader:
    """Reads the rows of ranges of an epoch's order. Keeps the block that was read last open."""

    def __init__(self, source: Source, order: EpochOrder, ranges: Sequence[Range]) -> None:
        self.size = size_of(ranges)
        self.source = source
        self._order = order
        self._ranges = ranges
        self._open: tuple[int, Rows] | None = None

    def read(self, start: int, stop: int) -> Any:
        """The rows from one place of the part up to, without, another."""
        pieces = [
            self._block(block).take(rows)
            for low, high in part(self._ranges, start, stop)
            for block, rows in self._order.pieces(low, high)
        ]
        return self.source.combine(pieces)

    def _block(self, block: int) -> Rows:
        if self._open is None or self._open[0] != block:
            self._open = None  # not both in memory
            self._open = block, self.source.open_block(block)
        return self._open[1]


class LocalShuffle:
    """Mixes the rows of a part within windows of a few batches, in the same way each time.

    Args:
        reader: Reads the part.
        window: Rows that are mixed, and in memory, at once.
        seed: From which the order within the windows is drawn.
        epoch: Each epoch has an order of its own.
    """

    def __init__(self, reader: PartReader, window: int, seed: int, epoch: int) -> None:
        self._reader = reader
        self._window = window
        self._key = derive_key(seed, epoch)
        self._open: tuple[int, Any, Permutation] | None = None

    def read(self, start: int, stop: int) -> Any:
        """The rows from one place of the mixed part up to, without, another."""
        pieces = []
        while start < stop:
            number = start // self._window
            base = number * self._window
            rows, order = self._load(number, base)
            upto = min(stop, base + self._window)
            pieces.append(_pick(rows, order, start - base, upto - base))
            start = upto
        return self._reader.source.combine(pieces)

    def _load(self, number: int, base: int) -> tuple[Any, Permutation]:
        if self._open is None or self._open[0] != number:
            self._open = None
            stop = min(base + self._window, self._reader.size)
            order = Permutation(stop - base, derive_key(self._key, number))
            self._open = number, self._reader.read(base, stop), order
        return self._open[1], self._open[2]


def _pick(rows: Any, order: Permutation, start: int, stop: int) -> Any:
    import numpy as np

    numbers = order.take(np.arange(start, stop))
    if isinstance(rows, list):
        return [rows[number] for number in numbers]
    import pyarrow

    return rows.take(pyarrow.array(numbers))


def read_stream(
    source: StreamSource,
    epoch: int,
    origin: int,
    taken: int,
    rank: int,
    world_size: int,
    batch_size: int,
    *,
    drop_last: bool,
    name: str = "",
) -> Iterator[list[Any]]:
    """A rank's batches of items, as many as every other rank has.

    Every rank reads all items. Of each ``world_size`` of them that follow each other, it keeps one.

    Args:
        source: The data.
        epoch: Which epoch.
        origin: Items of the epoch that ranks of another number have seen. If what they have left
            is not one for each rank, some are given to several.
        taken: Items that each rank has seen after those.
        rank: Which rank.
        world_size: Number of ranks.
        batch_size: Items of a batch. Where the last items are less than one for each rank, they
            join the batch before.
        drop_last: Leave out what does not fill a batch on every rank.
        name: Name of the dataset.

    Raises:
        ValueError: The epoch has items, but not one for each rank.
    """
    first: list[Any] = []  # one for each rank
    batch: list[Any] = []  # whole, and held back until it is known whether more join it
    filling: list[Any] = []
    count = 0
    skip = origin + taken * world_size
    for number, item in enumerate(source.items(epoch)):
        if number < skip:
            continue
        if count < world_size:
            first.append(item)
        if count % world_size == rank:
            filling.append(item)
        count += 1
        if count % (world_size * batch_size) == 0:
            if batch:
                yield batch
            batch, filling = filling, []
    rest = count % (world_size * batch_size)
    if rest == 0 or drop_last:
        filling = []
    elif count < world_size and taken:
        filling = []  # they were in the batch before
    elif count < world_size and origin:
        filling = [first[rank % count]]
    elif count < world_size:
        raise ValueError(
            f"datasets[{name!r}] gave {count} items in epoch {epoch}, less than one for each of "
            f"{world_size} workers."
        )
    if batch and rest < world_size:
        batch += filling
        filling = []
    if batch:
        yield batch
    if filling:
        yield filling
