"""Parquet files: read by row groups, with the columns and rows that are needed only."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from miniray.data.blocks import from_file
from miniray.data.expressions import Expr, comparisons
from miniray.data.files import PathColumns, bunched, is_local, unified
from miniray.data.sources import Content, Datasource, ReadUnit, between, overlapping
from miniray.data.transforms import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from miniray.data.sources import CutWish

#: Files whose footers are read at once.
_READERS = 16
#: About how many bytes, and numbers or texts, are decoded at once: column by column, so more are
#: faster. Arrow holds ten times the bytes of small integers meanwhile.
_BYTES, _VALUES = 20 * 2**20, 4 * 2**20
#: Rows that are decoded at once, at most, where texts are numbers of a dictionary: nothing tells
#: how long they are.
_ROWS = 131_072
#: Bytes of row groups that are large: fewer tasks read one.
_LARGE = 4 * 2**20
#: Bytes of each column of a local file that are read at once.
_BUFFER = 2**18
#: Whether a comparison may be true for a value of a column that lies between two.
_POSSIBLE: dict[str, Callable[[Any, Any, Any], bool]] = {
    "equal": lambda value, least, most: bool(least <= value <= most),
    "less": lambda value, least, most: bool(least < value),
    "less_equal": lambda value, least, most: bool(least <= value),
    "greater": lambda value, least, most: bool(most > value),
    "greater_equal": lambda value, least, most: bool(most >= value),
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows of a row group."""

    path: str
    group: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class ParquetRows(Content):
    """Pieces of files, read one after another.

    Attributes:
        columns: Their names; None: all.
        expr: Leaves out rows; None: none.
        paths: The columns that paths tell of.
        schema: Of the rows, before columns are left out.
        pieces: None in what units are made of.
    """

    filesystem: Any
    columns: Sequence[str] | None = None
    expr: Expr | None = None
    paths: PathColumns = PathColumns()  # noqa: RUF009 -- a tuple
    schema: Any = None
    pieces: tuple[Piece, ...] = ()

    def open(self, path: str) -> Any:
        """Open a file.

        Raises:
            DataError: It is no Parquet file.
        """
        try:
            if is_local(self.filesystem):
                # By pyarrow itself, without the interpreter, and a part at a time: else it holds
                # a whole row group.
                return pq.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
            return pq.ParquetFile(self.filesystem.open(path, "rb"))
        except pa.ArrowInvalid as error:
            raise DataError(f"{path} is not a Parquet file: {error}") from error

    @property
    def names(self) -> list[str]:
        """The columns that come out."""
        return list(self.schema.names if self.columns is None else self.columns)

    @property
    def used(self) -> set[str]:
        """The columns that come out or that rows are chosen by."""
        chosen_by = set() if self.expr is None else self.expr.columns()
        return chosen_by.union(self.names)

    @property
    def label(self) -> str:
        first = self.pieces[0]
        if len(self.pieces) == 1:
            return f"{first.path} (row group {first.group}, from row {first.start})"
        return f"{first.path} and what follows it (row groups: {len(self.pieces)})"

    def tables(self, start: int, stop: int, *values: Any) -> Iterator[Any]:
        if self.expr is not None:  # only reading tells which row has which number
            return between(self._read_all(self.pieces), start, stop)
        found = overlapping(self.pieces, lambda piece: piece.stop - piece.start, start, stop)
        return self._read_all(
            dataclasses.replace(piece, start=piece.start + low, stop=piece.start + high)
            for piece, low, high in found
        )

    def _read_all(self, pieces: Iterable[Piece]) -> Iterator[Any]:
        for path, own in itertools.groupby(pieces, key=lambda piece: piece.path):
            file = self.open(path)
            for piece in own:
                yield from self._read(file, piece)

    def _read(self, file: Any, piece: Piece) -> Iterator[Any]:
        used = self.used
        columns = [name for name in file.schema_arrow.names if name in used]
        group = file.metadata.row_group(piece.group)
        chunks = _chunks(group, used)
        values = sum(chunk.num_values for chunk in chunks)
        parts = max(1, _decoded(group, used) / _BYTES, values / _VALUES)
        rows = min(int(group.num_rows / parts), piece.stop)
        if any(each.has_dictionary_page and "BYTE" in each.physical_type for each in chunks):
            rows = min(rows, _ROWS)
        batches = file.iter_batches(
            max(1, rows),
            row_groups=[piece.group],
            columns=columns,
            use_threads=False,
        )
        tables = (pa.Table.from_batches([batch]) for batch in batches)
        try:
            for table in between(tables, piece.start, piece.stop):
                yield self._finished(table, piece.path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{piece.path}, row group {piece.group}: {error}") from error

    def _finished(self, table: Any, path: str) -> Any:
        """Return rows of a file with the columns that come out, null where the file has none."""
        table = self.paths.beside(from_file(table), path)
        for name in self.used.difference(table.column_names):
            field = self.schema.field(name)
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
        if self.expr is not None:
            table = table.filter(self.expr.values(table))
        return table.select(self.names)


@dataclasses.dataclass(frozen=True, eq=False)
class ParquetDatasource(Datasource):
    """Parquet files. Their footers are read when units are made, except for the first one's."""

    #: Paths and sizes.
    found: Sequence[tuple[str, int]]
    wanted: ParquetRows
    #: Those that were read before, by path.
    footers: dict[str, Any] = dataclasses.field(default_factory=dict)
    name = "ReadParquet"

    def schema(self) -> Any:
        """Return the schema, of the first footer and the folders' names."""
        schema = self._complete(self._footer(self.found[0][0]).schema.to_arrow_schema())
        names = self.wanted.columns
        return schema if names is None else pa.schema([schema.field(name) for name in names])

    def _complete(self, schema: Any) -> Any:
        """Return a schema of files with what their paths tell."""
        # By its method empty_table(), Arrow would import pandas, as for any value of Python.
        table = from_file(pa.table([pa.nulls(0, kind) for kind in schema.types], schema=schema))
        return self.wanted.paths.beside(table, self.found[0][0]).schema

    def count(self) -> int | None:
        """Return the number of rows from the footers; None if rows are left out."""
        if self.wanted.expr is not None:
            return None
        return int(sum(footer.num_rows for footer in self._all_footers()))

    def selected(self, columns: Sequence[str]) -> ParquetDatasource:
        """Return a source of these columns; those that it lacks are an error."""
        known = self.schema().names
        missing = [name for name in columns if name not in known]
        if missing:
            raise ValueError(
                f"{self.found[0][0]} has no column {missing[0]!r}, but {', '.join(known)}."
            )
        return self._with(columns=tuple(columns))

    def filtered(self, expr: Expr) -> Datasource | None:
        """Return a source that leaves out the rows for which the expression is not true."""
        if not expr.columns() <= set(self.schema().names) or self.wanted.columns is not None:
            return None
        both = expr if self.wanted.expr is None else self.wanted.expr & expr
        return self._with(expr=both)

    def _with(self, **changes: Any) -> ParquetDatasource:
        return dataclasses.replace(self, wanted=dataclasses.replace(self.wanted, **changes))

    def units(self, wish: CutWish) -> Iterator[ReadUnit]:
        """Yield units: some rows of a row group, or several small row groups together."""
        found = list(zip(self.files(), self._all_footers(), strict=True))
        schema = unified("Parquet", [(p, each.schema.to_arrow_schema()) for p, each in found])
        wanted = dataclasses.replace(self.wanted, schema=self._complete(schema))
        groups = [
            (Piece(path, number, 0, group.num_rows), _decoded(group, wanted.used))
            for path, footer in found
            for number, group in enumerate(map(footer.row_group, range(footer.num_row_groups)))
            if group.num_rows and self._may_match(group)
        ]
        rows, total = sum(piece.stop for piece, _ in groups), sum(size for _, size in groups)
        step = wish.rows_each(rows, total) if rows else 1
        # The end of a row group is decoded with its beginning: groups are cut for functions only,
        # and large ones so that each CPU has a part: parts are four for each.
        parts = max(1, wish.parts // 4) if total > _LARGE * len(groups) else wish.parts
        cut = max(step, dataclasses.replace(wish, target=total + 1, parts=parts).rows_each(rows, 0))
        for some in bunched(groups, lambda each: each[0].stop, step):
            piece, size = some[0][0], sum(size for _, size in some)
            if piece.stop <= step:
                yield _unit(wanted, tuple(each for each, _ in some), size)
                continue
            for start in range(0, piece.stop, cut):  # a row group that is larger is alone
                part = dataclasses.replace(piece, start=start, stop=min(start + cut, piece.stop))
                yield _unit(wanted, (part,), size * (part.stop - start) // piece.stop)

    def _may_match(self, group: Any) -> bool:
        """Return False if the statistics of a row group say that no row passes the filter."""
        if self.wanted.expr is None:
            return True
        columns = map(group.column, range(group.num_columns))
        statistics = {column.path_in_schema: column.statistics for column in columns}
        for name, function, value in comparisons(self.wanted.expr):
            known = statistics.get(name)
            if known is not None and known.has_min_max and function in _POSSIBLE:
                with contextlib.suppress(TypeError):  # types that reading may bring together
                    if not _POSSIBLE[function](value, known.min, known.max):
                        return False
        return True

    def _footer(self, path: str) -> Any:
        if path not in self.footers:
            with self.wanted.open(path) as file:
                self.footers[path] = file.metadata
        return self.footers[path]

    def _all_footers(self) -> list[Any]:
        missing = [path for path, _ in self.found if path not in self.footers]
        if len(missing) > 1:
            with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
                list(pool.map(self._footer, missing))
        return [self._footer(path) for path, _ in self.found]


def _unit(wanted: ParquetRows, pieces: tuple[Piece, ...], size: int) -> ReadUnit:
    rows = sum(piece.stop - piece.start for piece in pieces) if wanted.expr is None else None
    return ReadUnit(dataclasses.replace(wanted, pieces=pieces), rows, size)


def _decoded(group: Any, names: Collection[str]) -> int:
    """Return about how many bytes columns of a row group take in memory."""
    return sum(chunk.total_uncompressed_size for chunk in _chunks(group, names))


def _chunks(group: Any, names: Collection[str]) -> list[Any]:
    """Return what a row group's metadata says of columns."""
    chunks = map(group.column, range(group.num_columns))
    return [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in names]
