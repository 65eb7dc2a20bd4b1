"""Exchanges: rows that belong together are brought into one partition, which is made a table.

Every exchange cuts rows by an order: that of key columns, of row numbers, or of numbers drawn from
a seed and the row number. A partition has a range of that order, so that rows of equal keys are
together, and the result does not depend on how the input was cut and where it ran.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from miniray.data.sources import Content, ReadUnit, between
from miniray.data.tables import concat
from miniray.data.transforms import Transform

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from miniray.data.transforms import Where

#: The column that pieces of a shuffle have beside those of the rows.
ORDER = "__miniray_order__"


class How:
    """What an exchange does; see ``Exchange`` in the plan.

    Attributes:
        name: As plans name it.
        keeps_count: Whether as many rows come out as go in.
    """

    name: str = ""
    keeps_count: bool = True

    def bounds(self, samples: Sequence[Any], parts: int) -> Sequence[Any]:
        """Return where each of the parts but the first begins; samples are tables of keys."""
        raise NotImplementedError

    def cut(self, table: Any, first: int, side: int, bounds: Sequence[Any]) -> list[Any]:
        """Return the rows of a table that go into each partition.

        ``side`` is the input that it is of, and ``first`` the number of its first row there.
        """
        raise NotImplementedError

    def merge(self, sides: Sequence[Sequence[Any]]) -> Any:
        """Return the table of a partition from its tables, in order, by input."""
        raise NotImplementedError

    def schema(self, schemas: Sequence[Any]) -> Any:
        """Return the schema of the result for inputs of these; None if only running shows it."""
        return schemas[0] if self.keeps_count and len(schemas) == 1 else None


# --- row numbers ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Numbered(How):
    """Distributes rows by their numbers: at random, or in turns.

    Attributes:
        seed: What the new order is drawn from; None: partitions take rows in turns.
    """

    seed: int | None
    name: str = "RandomShuffle"

    def bounds(self, samples: Sequence[Any], parts: int) -> Sequence[Any]:
        return range(1, parts)

    def _numbers(self, first: int, rows: int) -> Any:
        """Return the sort keys of rows: their numbers, or hashes of these."""
        index: Any = np.arange(first, first + rows, dtype=np.uint64)
        if self.seed is None:
            return index
        with np.errstate(over="ignore"):  # splitmix64, which maps no two rows to one number
            index += np.uint64(self.seed * 0x9E3779B97F4A7C15 & 2**64 - 1)
            index = (index ^ index >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            index = (index ^ index >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return index ^ index >> np.uint64(31)

    def cut(self, table: Any, first: int, side: int, bounds: Sequence[Any]) -> list[Any]:
        numbers = self._numbers(first, table.num_rows)
        parts = len(bounds) + 1
        part = numbers % parts if self.seed is None else numbers // np.uint64(2**64 // parts + 1)
        part = part.astype(np.min_scalar_type(parts))  # which are sorted faster
        order = np.argsort(part, kind="stable")
        table = table.append_column(ORDER, pa.array(numbers)).combine_chunks().take(order)
        return sliced(table, np.cumsum(np.bincount(part, minlength=parts)).tolist())

    def merge(self, sides: Sequence[Sequence[Any]]) -> Any:
        table = concat(sides[0])
        if ORDER not in table.column_names:  # all rows are in this partition
            table = table.append_column(ORDER, pa.array(self._numbers(0, len(table))))
        table = table.combine_chunks()
        order = np.argsort(table.column(ORDER).to_numpy())
        return table.take(order).drop_columns([ORDER])


@dataclasses.dataclass(frozen=True)
class Aligned(How):
    """Brings together the rows of the same numbers: of one input a range, of several a zip."""

    name: str = "Repartition"

    def merge(self, sides: Sequence[Sequence[Any]]) -> Any:
        """Return the columns of all inputs; a name that is there gets a number behind it."""
        table = concat(sides[0])
        for each in sides[1:]:
            other = concat(each)
            for name in other.column_names:
                named = (f"{name}_{n}" if n else name for n in itertools.count())
                free = next(new for new in named if new not in table.column_names)
                table = table.append_column(free, other.column(name))
        return table


def sliced(table: Any, ends: Sequence[int]) -> list[Any]:
    """Return the parts of a table that end at these rows."""
    return [table.slice(low, high - low) for low, high in itertools.pairwise([0, *ends])]


# --- steps and units --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cut(Transform):
    """Gives a table for each partition, with the rows of a call that go there."""

    name: str
    how: How
    side: int
    bounds: Sequence[Any]
    keeps_count = False

    def run(self, tables: Iterator[Any], where: Where) -> Iterator[Any]:
        """Yield as many tables as there are partitions, in their order."""
        pieces: list[list[Any]] = [[] for _ in range(len(self.bounds) + 1)]
        first = where.index
        for table in tables:
            cut = self.how.cut(table, first, self.side, self.bounds)
            for own, piece in zip(pieces, cut, strict=True):
                own.append(piece)
            first += table.num_rows
        for place, own in enumerate(pieces):
            yield concat([piece for piece in own if piece.num_rows] or own[:1])
            pieces[place] = []


def together(
    sides: Sequence[Sequence[ReadUnit]],
    how: How | None = None,
    place: tuple[int, int] = (0, 1),
    key: int | None = None,
) -> ReadUnit:
    """Return a unit of units that are read together, of each side some.

    ``how`` makes one table of theirs; without, they come one after another. ``place`` says which
    partition this is, and of how many.
    """
    units = [unit for side in sides for unit in side]
    rows = [unit.rows for unit in sides[0]]
    known = None not in rows and (how is None or how.keeps_count)
    bare = tuple(tuple((unit.bare(), len(unit.refs)) for unit in side) for side in sides)
    return ReadUnit(
        Partition(bare, how, place),
        sum(filter(None, rows)) if known else None,
        sum(unit.size for unit in units),
        tuple(ref for unit in units for ref in unit.refs),
        key=key,
    )


@dataclasses.dataclass(frozen=True)
class Partition(Content):
    """Units that are read together, each with how many refs it needs of those of all."""

    sides: tuple[tuple[tuple[ReadUnit, int], ...], ...]
    how: How | None
    place: tuple[int, int]

    @property
    def label(self) -> str:
        if self.how is not None:
            number, count = self.place
            return f"partition {number + 1} of {count} of {self.how.name}"
        labels = [unit.label for unit, _ in self.sides[0]]
        return labels[0] if len(labels) == 1 else f"{labels[0]} up to {labels[-1]}"

    def tables(self, start: int, stop: int, *values: Any) -> Iterator[Any]:
        left = iter(values)
        read = (
            (unit.read(*itertools.islice(left, count)) for unit, count in side)
            for side in self.sides
        )
        sides = map(itertools.chain.from_iterable, read)
        if self.how is None:
            yield from between(next(sides), start, stop)
            return
        # Tables without columns are of units that were empty before anything was known.
        filled = [[t for t in side if t.num_columns] or side for side in map(list, sides)]
        yield from between([self.how.merge(filled)], start, stop)
