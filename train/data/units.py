"""Units of ``miniray.data`` as a source: a rank reads its own rows of each epoch, unit by unit."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from miniray.data.blocks import from_file
from miniray.data.sources import ENDLESS, Content, ReadUnit, between
from miniray.data.tables import concat
from miniray.data.transforms import DataError
from miniray.train.data.order import TOGETHER, EpochOrder, part, size_of
from miniray.train.data.sources import Reader, Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from miniray.data.feeds import Feed
    from miniray.train.data.order import Range, Span

#: Units of the next pass that are read ahead of its begin, at most.
_AHEAD = 4
#: Bytes of rows that a rank takes out of a unit at once, about.
_BYTES = 16 * 2**20
#: Rows of a Hugging Face dataset that are read at once: where these were selected, it copies them.
_COPIED = 1024
#: Files whose metadata are read at once.
_READERS = 16


@dataclasses.dataclass(frozen=True)
class HubRows(Content):
    """The rows of a ``datasets.Dataset`` that gives tables of Arrow."""

    dataset: Any
    label = "the Hugging Face dataset"

    def tables(self, start: int, stop: int, *values: Any) -> Iterator[Any]:
        for low in range(start, min(stop, len(self.dataset)), _COPIED):
            yield self.dataset[low : min(low + _COPIED, stop)]

    def take(self, start: int, stop: int, numbers: Iterable[Any], *values: Any) -> Iterator[Any]:
        for each in numbers:
            yield self.dataset[(each + start).tolist()]


@dataclasses.dataclass(frozen=True)
class FragmentRows(Content):
    """A piece of a ``pyarrow.dataset.Dataset``: a row group of Parquet, or a whole file."""

    fragment: Any
    schema: Any

    @classmethod
    def units(cls, dataset: Any) -> list[ReadUnit]:
        """Return the pieces of a dataset; metadata of several files are read at once.

        Raises:
            ValueError: The dataset is filtered or projected, so that metadata do not give its rows.
        """
        schema = dataset.schema

        def pieces(fragment: Any) -> list[ReadUnit]:
            if not hasattr(fragment, "row_groups"):
                return [ReadUnit(cls(fragment, schema), fragment.count_rows())]
            return [
                ReadUnit(
                    cls(fragment.subset(row_group_ids=[group.id]), schema),
                    group.num_rows,
                    group.total_byte_size,
                )
                for group in fragment.row_groups
            ]

        with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
            return [unit for each in pool.map(pieces, dataset.get_fragments()) for unit in each]

    @property
    def label(self) -> str:
        return str(self.fragment.path)

    def tables(self, start: int, stop: int, *values: Any) -> Iterator[Any]:
        # One column after another by one thread: training has the others.
        table = from_file(self.fragment.to_table(schema=self.schema, use_threads=False))
        yield table.slice(start, stop - start)


class UnitsSource(Source):
    """Units that each rank reads itself; one is in its memory at a time."""

    #: Whether what makes the rows stays between passes.
    stays = False

    def __init__(self, units: Iterable[ReadUnit]) -> None:
        self._units = [unit for unit in units if unit.rows]

    @property
    def block_sizes(self) -> Sequence[int]:
        """Rows of each unit."""
        return [unit.rows or 0 for unit in self._units]

    def passes(self, seed: int | None, whole: Sequence[Range], share: int) -> PassReader:
        return PassReader(self, seed, whole, share)

    def is_local(self) -> bool:
        """Return whether the rank makes the rows itself."""
        return True

    def tables(self, units: Feed, share: int, *, local: bool) -> Iterator[Any]:
        """Return the rows of units, in their order.

        Args:
            units: Units, with the rows to read of each.
            share: How many ranks there are, among which pools are divided.
            local: Make them in this process.
        """
        del share, local
        while isinstance(unit := next(units), ReadUnit):
            yield from unit.read(*unit.values())

    def selected(self, block: int, span: Span, epoch: int) -> ReadUnit:
        """Return a unit with these rows of a unit."""
        del epoch
        unit = self._units[block]
        few = _BYTES * (unit.rows or 0) // max(unit.size, 1)
        return chosen(unit, span, most=max(1, min(few, TOGETHER)))


def chosen(unit: ReadUnit, span: Span, key: int | None = None, most: int = ENDLESS) -> ReadUnit:
    """Return some rows of a unit, in the order of an epoch.

    Args:
        unit: The unit.
        span: Which rows.
        key: From which random numbers are drawn: a pass that is resumed draws the same ones.
        most: Rows of a table, at most, if they do not keep their order.
    """
    rows = span.stop - span.start
    return ReadUnit(Chosen(unit.bare(), span, most), rows, refs=unit.refs, key=key)


@dataclasses.dataclass(frozen=True)
class Chosen(Content):
    """Some rows of a unit, in the order of an epoch."""

    unit: ReadUnit
    span: Span
    most: int

    @property
    def label(self) -> str:
        return f"the chosen rows of {self.unit.label}"

    def tables(self, start: int, stop: int, *values: Any) -> Iterator[Any]:
        span = self.span
        if span.key is None:
            found = self.unit.part(span.start, span.stop).read(*values)
        else:
            numbers = (each.numbers() for each in span.parts(self.most))
            found = self.unit.take(numbers, *values)
        return between(found, start, stop)


class Passes:
    """The units of a rank's passes, and of the pass after the last that has begun the first ones.

    Args:
        source: Of which the units are.
        seed: From which the orders of epochs are drawn.
        whole: The rank's part of a whole epoch.
        epoch: Of the first pass, which has not begun.
    """

    def __init__(
        self, source: UnitsSource, seed: int | None, whole: Sequence[Range], epoch: int
    ) -> None:
        self._source, self._seed, self._whole = source, seed, whole
        self._first = epoch
        self._begun = epoch - 1

    def begin(self) -> None:
        """Give all units of the next pass."""
        self._begun += 1

    def feed(self, ranges: Sequence[Range]) -> Feed:
        """Yield the units, of the first pass those of ranges, as a feed of an execution."""
        ahead = _AHEAD if self._source.stays else 0
        for epoch in itertools.count(self._first):
            order = EpochOrder(self._source.block_sizes, self._seed, epoch)
            spans = (each for low, high in ranges for each in order.spans(low, high))
            for number, (block, span) in enumerate(spans):
                while epoch > self._begun and number >= ahead:
                    yield []
                yield self._source.selected(block, span, epoch)
            while epoch > self._begun:
                yield []
            ranges = self._whole


class PassReader(Reader):
    """Reads a rank's rows by their place in its part, pass after pass.

    While the rest of a pass is read, the first tasks of the next one run, if tasks make the rows,
    unless the plan has a pool that must not stay.

    Args:
        source: Whose rows.
        seed: From which the orders of epochs are drawn.
        whole: The rank's part of a whole epoch.
        share: How many ranks there are.
    """

    def __init__(
        self, source: UnitsSource, seed: int | None, whole: Sequence[Range], share: int
    ) -> None:
        self.source = source
        self._seed, self._whole, self._share = seed, whole, share
        self._epoch = -1
        self._ranges: Sequence[Range] = ()
        self._at = -1  # the place from which the tables go on
        self._left = 0  # rows of the pass before that come first
        self._local = False
        self._tables: Iterator[Any] = iter(())
        self._held: list[Any] = []

    def prepare(self, epoch: int, ranges: Sequence[Range], start: int) -> None:
        """Start the first tasks of a pass, where they may run before it begins."""
        if self.source.stays:
            self._start(epoch, ranges, start)

    def _start(self, epoch: int, ranges: Sequence[Range], start: int) -> None:
        """Start the first tasks of a pass; ``start`` is the place where it begins."""
        self._epoch, self._ranges, self.size = epoch, ranges, size_of(ranges)
        self._at, self._left, self._held = start, 0, []
        self._local = self.source.is_local()
        left = part(ranges, start, self.size)
        self._units = Passes(self.source, self._seed, self._whole, epoch)
        self._tables = self.source.tables(self._units.feed(left), self._share, local=self._local)

    def begin(self, epoch: int, ranges: Sequence[Range], start: int) -> None:
        """Begin a pass, with its prepared tasks if ``prepare`` was for this one."""
        prepared = (self._epoch, self._ranges, self._at) == (epoch, ranges, start)
        if not prepared or self._local != self.source.is_local():
            self._start(epoch, ranges, start)
        self._units.begin()

    def end(self) -> None:
        """End the pass: the next one is that over the whole part."""
        if not self.source.stays:
            # This ends its pools, and frees the data read.
            self._epoch, self._tables, self._held = -1, iter(()), []
            return
        self._left += self.size - self._at
        self._epoch, self._ranges, self._at = self._epoch + 1, self._whole, 0
        self.size = size_of(self._whole)

    def read(self, start: int, stop: int) -> Any:
        """Return the rows from one place of the part up to, without, another."""
        if start != self._at:
            self._start(self._epoch, self._ranges, start)
            self._units.begin()
        if self._left:
            self._rows(self._left)
            self._left = 0
        self._at = stop
        return self._rows(stop - start)

    def _rows(self, wanted: int) -> Any:
        have = sum(table.num_rows for table in self._held)
        while have < wanted:
            table = next(self._tables, None)
            if table is None:
                raise DataError(
                    f"A dataset has ended {wanted - have} rows too early: its files have changed "
                    f"since its rows were counted."
                )
            if table.num_rows:
                self._held.append(table)
                have += table.num_rows
        whole = concat(self._held)
        self._held = [whole.slice(wanted)] if have > wanted else []
        return whole.slice(0, wanted)
