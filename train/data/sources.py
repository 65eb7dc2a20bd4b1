"""What datasets are read as: sources of a known number of rows, or streams of items.

And what reads a rank's part of them, and makes batches of NumPy, pandas or Arrow.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from miniray.train.data.order import (
    ENDLESS,
    TOGETHER,
    EpochOrder,
    Permutation,
    derive_key,
    part,
    size_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from miniray.train.data.order import Position, Range


class Source(abc.ABC):
    """Data with a known number of rows."""

    #: Whether pieces are tables of Arrow; otherwise they are lists of items.
    tabular: bool = True
    #: Modules that reading it needs, and that take long to load.
    modules: Sequence[str] = ()
    #: Pools of actors that its rows go through, from the first.
    pools: Sequence[Any] = ()

    @property
    @abc.abstractmethod
    def block_sizes(self) -> Sequence[int]:
        """Rows of each block, which is read at once."""

    @abc.abstractmethod
    def passes(self, seed: int | None, whole: Sequence[Range], share: int) -> Reader:
        """Return what reads passes over a rank's part.

        Args:
            seed: From which the orders of epochs are drawn; None keeps the data's own.
            whole: The rank's part of a whole epoch.
            share: How many ranks there are.
        """

    @property
    def num_rows(self) -> int:
        return sum(self.block_sizes)


class MapSource(Source):
    """A dataset with ``__len__`` and ``__getitem__``; its items are read one by one."""

    tabular = False

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    @property
    def block_sizes(self) -> Sequence[int]:
        return [len(self._dataset)]

    def passes(self, seed: int | None, whole: Sequence[Range], share: int) -> Reader:
        del whole, share
        return ItemReader(self._dataset, seed)


class StreamSource:
    """A dataset with ``__iter__`` alone, read from its beginning, of unknown length.

    Each rank iterates over all of it and keeps its own items, so that every rank finds the end of
    the data. A dataset with ``set_epoch`` gets the epoch by that.
    """

    tabular = False
    modules: Sequence[str] = ()
    pools: Sequence[Any] = ()
    num_rows = ENDLESS

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def items(self, epoch: int) -> Iterator[Any]:
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return iter(self._dataset)


def formatter(batch_format: str | None, *, tabular: bool) -> Callable[[Any], Any]:
    """Return what turns rows of a source into a batch.

    Args:
        batch_format: ``"default"``, ``"numpy"``, ``"pandas"``, ``"pyarrow"``; None is the last.
        tabular: Whether rows are tables of Arrow; otherwise they are lists of items.

    Raises:
        ValueError: There is no such format, or not for these rows.
    """
    if tabular:
        from miniray.data.blocks import check_format, table_to_batch

        check_format("iter_batches", batch_format)
        return functools.partial(table_to_batch, batch_format=batch_format)
    if batch_format not in ("default", "numpy"):
        raise ValueError(
            f"iter_batches(batch_format={batch_format!r}) is for tables. This dataset gives items, "
            f"which come as batch_format='numpy'."
        )
    return collate_numpy


def collate_numpy(items: Sequence[Any]) -> Any:
    """Return items as arrays, in the structure of one item: a dictionary, a tuple, or a value."""
    first = items[0]
    if isinstance(first, dict):
        return {key: collate_numpy([item[key] for item in items]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(collate_numpy(column) for column in zip(*items, strict=True))
    arrays = [np.asarray(item) for item in items]
    if arrays[0].dtype.kind in "US":
        return np.array(items, dtype=object)
    if len({array.shape for array in arrays}) > 1:
        ragged: Any = np.empty(len(arrays), dtype=object)
        ragged[:] = arrays
        return ragged
    return np.stack(arrays)


class Reader(abc.ABC):
    """Reads a rank's rows by their place in its part, pass after pass.

    Attributes:
        size: The rows of the pass that has begun.
    """

    size: int = 0

    def prepare(self, epoch: int, ranges: Sequence[Range], start: int) -> None:  # noqa: B027
        """Make what can be made ahead of a pass; the arguments are those of ``begin``."""

    @abc.abstractmethod
    def begin(self, epoch: int, ranges: Sequence[Range], start: int) -> None:
        """Begin a pass.

        Args:
            epoch: Its number.
            ranges: The positions that are read.
            start: The place among these of the first row that is wanted.
        """

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> Any:
        """Return the rows from one place up to, without, another: a table, or a list of items."""

    def end(self) -> None:  # noqa: B027
        """End the pass."""


class ItemReader(Reader):
    """Reads items by number, one after another.

    Args:
        dataset: Has the items, by number.
        seed: From which the orders of epochs are drawn.
    """

    def __init__(self, dataset: Any, seed: int | None) -> None:
        self._dataset, self._seed = dataset, seed

    def begin(self, epoch: int, ranges: Sequence[Range], start: int) -> None:
        self._epoch, self._ranges, self.size = epoch, ranges, size_of(ranges)
        self._seek(start)

    def _seek(self, start: int) -> None:
        order = EpochOrder([len(self._dataset)], self._seed, self._epoch)
        self._at = start  # the place of the next number
        self._numbers = (
            int(number)
            for low, high in part(self._ranges, start, self.size)
            for _, span in order.spans(low, high)
            for few in span.parts(TOGETHER)
            for number in few.numbers()
        )

    def read(self, start: int, stop: int) -> list[Any]:
        if start != self._at:
            self._seek(start)
        self._at = stop
        numbers = list(itertools.islice(self._numbers, stop - start))
        # As PyTorch's own loader does: datasets may read several items at once.
        several = getattr(self._dataset, "__getitems__", None)
        if several is not None:
            return list(several(numbers))
        return [self._dataset[number] for number in numbers]


class LocalShuffle:
    """Mixes the rows of a part within windows of a few batches, in the same way each time.

    Args:
        window: Rows that are mixed, and in memory, at once.
        seed: From which the order within the windows is drawn.
        epoch: Each epoch has an order of its own.
    """

    def __init__(self, reader: Reader, window: int, seed: int, epoch: int) -> None:
        self._reader = reader
        self._window = window
        self._key = derive_key(seed, epoch)
        self._number = -1  # of the window that is loaded
        self._loaded: tuple[Any, Permutation] | None = None

    def read(self, start: int, stop: int) -> Any:
        """Return the rows from one place of the mixed part up to, without, another."""
        pieces = []
        while start < stop:
            number = start // self._window
            base = number * self._window
            rows, order = self._load(number, base)
            upto = min(stop, base + self._window)
            pieces.append(_pick(rows, order, start - base, upto - base))
            start = upto
        return _combined(pieces)

    def _load(self, number: int, base: int) -> tuple[Any, Permutation]:
        if self._loaded is None or self._number != number:
            self._loaded = None
            stop = min(base + self._window, self._reader.size)
            order = Permutation(stop - base, derive_key(self._key, number))
            self._number, self._loaded = number, (self._reader.read(base, stop), order)
        return self._loaded


def _combined(pieces: Sequence[Any]) -> Any:
    """Return lists of items, or tables, as one."""
    if isinstance(pieces[0], list):
        return [item for piece in pieces for item in piece]
    import pyarrow

    return pyarrow.concat_tables(pieces)


def _pick(rows: Any, order: Permutation, start: int, stop: int) -> Any:
    numbers = order.take(np.arange(start, stop))
    if isinstance(rows, list):
        return [rows[number] for number in numbers]
    from miniray.data.blocks import column

    return rows.take(column(numbers))


class StreamShuffle:
    """Mixes items within windows as they come, in the same way each time.

    Args:
        window: Items that are mixed, and in memory, at once.
        seed: From which the order within the windows is drawn.
        epoch: Each epoch has an order of its own.
        taken: Items that were handed out before, and do not come again.

    Attributes:
        begin: The first item that has to be added: where the window begins in which these end.
    """

    def __init__(self, window: int, seed: int, epoch: int, taken: int) -> None:
        self._window = window
        self._key = derive_key(seed, epoch)
        self._number, self._taken = divmod(taken, window)
        self.begin = self._number * window
        self._items: list[Any] = []

    def add(self, item: Any) -> list[Any]:
        """Add an item; those of its window, mixed, if it is the last one."""
        self._items.append(item)
        return self.rest() if len(self._items) == self._window else []

    def rest(self) -> list[Any]:
        """Return the items of the last window, which will not be filled."""
        items, taken = self._items, self._taken
        if not items:
            return []
        order = Permutation(len(items), derive_key(self._key, self._number))
        self._items, self._taken = [], 0
        self._number += 1
        return [items[number] for number in order.take(np.arange(taken, len(items)))]


@dataclasses.dataclass(frozen=True)
class StreamReader:
    """Reads a rank's batches of items, as many as every other rank has.

    Every rank reads all items. Of each ``world_size`` of them that follow each other, it keeps one.
    Where the last ones are less than one for each rank, they join the batch before. If those that
    ranks of another number have left are not one for each rank, some are given to several.

    Attributes:
        items: Those of the epoch.
        position: Where the rank begins, and how it mixes its items.
        batch_size: Items of a batch.
        drop_last: Leave out what does not fill a batch on every rank.
    """

    name: str
    items: Iterable[Any]
    rank: int
    position: Position
    batch_size: int
    drop_last: bool

    def batches(self) -> Iterator[list[Any]]:
        """Yield the batches of the rank.

        Raises:
            ValueError: The epoch has items, but not one for each rank.
        """
        position, batch_size, local = self.position, self.batch_size, self.position.local_shuffle
        taken, world_size, origin = position.taken, position.world_size, position.ranges[0][0]
        shuffle = StreamShuffle(*local, position.epoch, taken) if local else None
        begin = taken if shuffle is None else shuffle.begin
        count = (begin - taken) * world_size  # items that were not seen, when it is above 0
        first: list[Any] = []  # one for each rank
        ready: list[Any] = []  # own items in the order in which they are handed out
        whole = 0  # batches of these; the last is held back until it is known whether more join it
        for number, item in enumerate(self.items):
            if number < origin + begin * world_size:
                continue
            if not taken and count < world_size:
                first.append(item)
            if count % world_size == self.rank:
                ready += [item] if shuffle is None else shuffle.add(item)
            count += 1
            whole += count > 0 and count % (world_size * batch_size) == 0
            while whole > 1 and len(ready) >= batch_size:
                yield ready[:batch_size]
                del ready[:batch_size]
                whole -= 1
        if shuffle is not None:
            ready += shuffle.rest()
        if self._shares(count):
            ready, sizes = [first[self.rank % count]], [1]
        else:
            sizes = self._sizes(whole, count, len(ready))
        for size in sizes:
            yield ready[:size]
            del ready[:size]

    def _shares(self, count: int) -> bool:
        """Return whether there are fewer items than ranks, so that some are given to several."""
        position = self.position
        if self.drop_last or position.taken or not 0 < count < position.world_size:
            return False
        if not position.ranges[0][0]:
            raise ValueError(
                f"datasets[{self.name!r}] gave {count} items in epoch {position.epoch}, less than "
                f"one for each of {position.world_size} workers."
            )
        return True

    def _sizes(self, whole: int, count: int, ready: int) -> list[int]:
        """Return the sizes of the last batches: of ``whole`` ones, and of the remaining items."""
        batch_size, world_size = self.batch_size, self.position.world_size
        sizes = [batch_size] * whole
        rest = max(0, count) % (world_size * batch_size)
        if rest and not self.drop_last:
            last = ready - whole * batch_size
            if sizes and rest < world_size:
                sizes[-1] += last
            elif count >= world_size:
                sizes.append(last)
            # Else they were in the batch before.
        return sizes
