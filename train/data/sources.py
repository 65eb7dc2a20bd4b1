"""What datasets are read as: sources of rows in blocks, or streams of items."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from miniray.data.sources import ReadUnit


class Rows(Protocol):
    """An open block."""

    def take(self, rows: Any) -> Any:
        """These rows, in this order: a table of Arrow, or a list of items.

        Args:
            rows: Numbers within the block: a range, or an array of integers.
        """


class Source(abc.ABC):
    """Data with a known number of rows."""

    #: Whether pieces are tables of Arrow; otherwise they are lists of items.
    tabular: bool = True
    #: Modules that reading it needs, and that take long to load.
    modules: Sequence[str] = ()

    @property
    @abc.abstractmethod
    def block_sizes(self) -> Sequence[int]:
        """Rows of each block: what is read at once. At least one block, none without rows."""

    @abc.abstractmethod
    def open_block(self, block: int) -> Rows:
        """Make the rows of a block available."""

    def passes(self, seed: int | None, whole: Any, share: int) -> Any:
        """Return what reads passes over a rank's part; None if blocks are opened for that."""
        del seed, whole, share

    def combine(self, pieces: Sequence[Any]) -> Any:
        """Pieces of this source as one, in order."""
        if len(pieces) == 1:
            return pieces[0]
        if not self.tabular:
            return [item for piece in pieces for item in piece]
        import pyarrow

        return pyarrow.concat_tables(pieces)

    @property
    def num_rows(self) -> int:
        return sum(self.block_sizes)


class WholeSource(Source):
    """Data that are one block, as they are read by number."""

    def __init__(self, rows: Rows, size: int) -> None:
        self._rows = rows
        self._size = size

    @property
    def block_sizes(self) -> Sequence[int]:
        return [self._size]

    def open_block(self, block: int) -> Rows:
        del block
        return self._rows


class StreamSource(abc.ABC):
    """Data that can only be read from the beginning, of unknown length."""

    modules: Sequence[str] = ()

    @abc.abstractmethod
    def items(self, epoch: int) -> Iterator[Any]:
        """Return the items of an epoch."""


class ItemRows:
    """The items of a dataset, by number."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        # As PyTorch's own loader does: datasets may read several items at once.
        self._several = getattr(dataset, "__getitems__", None)

    def take(self, rows: Any) -> list[Any]:
        numbers = [int(row) for row in rows]
        if self._several is not None:
            return list(self._several(numbers))
        return [self._dataset[number] for number in numbers]


class MapSource(WholeSource):
    """A dataset with ``__len__`` and ``__getitem__``; its items are read one by one."""

    tabular = False

    def __init__(self, dataset: Any) -> None:
        super().__init__(ItemRows(dataset), len(dataset))


class IterableSource(StreamSource):
    """A dataset with ``__iter__`` alone.

    Each rank iterates over all of it and keeps its own items, so that every rank knows where the
    data end. A dataset with ``set_epoch`` is told the epoch.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def items(self, epoch: int) -> Iterator[Any]:
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return iter(self._dataset)


#: A table that keeps so many times its size alive, as a slice of a larger one does, is copied.
_SLICE_FACTOR = 1.5


@dataclasses.dataclass(frozen=True, eq=False)
class TableRows:
    """The rows of an Arrow table."""

    _table: Any

    def take(self, rows: Any) -> Any:
        """These rows; those that follow each other are not copied."""
        if isinstance(rows, range):
            return self._table.slice(rows.start, len(rows))
        import pyarrow

        return self._table.take(pyarrow.array(rows))


class UnitsSource(Source):
    """Units of ``miniray.data`` that each rank reads itself; one is in its memory at a time."""

    def __init__(self, units: Iterable[ReadUnit]) -> None:
        self._units = [unit for unit in units if unit.rows]

    @property
    def block_sizes(self) -> Sequence[int]:
        """Rows of each unit."""
        return [unit.rows or 0 for unit in self._units]

    def open_block(self, block: int) -> TableRows:
        """Read a unit."""
        from miniray.data.tables import concat

        return TableRows(concat(list(self._units[block].read())).combine_chunks())


@dataclasses.dataclass(frozen=True)
class _HuggingFaceRows:
    dataset: Any

    def take(self, rows: Any) -> Any:
        chosen = slice(rows.start, rows.stop) if isinstance(rows, range) else rows.tolist()
        return self.dataset[chosen]


class HuggingFaceSource(WholeSource):
    """A ``datasets.Dataset`` whose values Arrow holds as they are: nothing has to be decoded."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(_HuggingFaceRows(dataset.with_format("arrow")), len(dataset))


def compact(table: Any) -> Any:
    """Return the table in one chunk per column, and without what it is a slice of.

    Taking rows out of many chunks puts these together each time.
    """
    import pyarrow

    if table.get_total_buffer_size() > _SLICE_FACTOR * table.nbytes:
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        table = pyarrow.ipc.open_stream(sink.getvalue()).read_all()
    chunked = any(column.num_chunks > 1 for column in table.columns)
    return table.combine_chunks() if chunked else table
