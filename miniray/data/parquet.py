"""Parquet files: read by row groups, with the columns and rows that are needed only."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import decimal
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from miniray.data.blocks import Pickled, Ragged, from_file, no_rows
from miniray.data.expressions import Expr, comparisons
from miniray.data.files import FileKind, FilesDatasource, Piece, bunched, is_local, together
from miniray.data.sources import CutWish, between
from miniray.data.tables import concat
from miniray.data.transforms import Columns, DataError, FilterExpr, Where, told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from miniray.data.sources import ReadUnit
    from miniray.data.transforms import Transform

#: Files whose footers are read at once, and in a row before units are made of them.
_READERS, _AHEAD = 16, 64
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


PARQUET = FileKind("ReadParquet", "Parquet", None, (".parquet", ".pq"))


@dataclasses.dataclass(frozen=True, eq=False)
class ParquetDatasource(FilesDatasource):
    """Parquet files. Footers are read when units are made, a few files ahead of these.

    Those of 16 files, from the first to the last, tell columns and sizes. Those of all files do if
    an expression chooses row groups; if they are known they tell columns, but no sizes: units are
    the same each time. Further columns of other files begin where these do.

    Attributes:
        columns: Their names; None: all.
        exprs: They leave out rows.
        known: The schema of the rows, before columns are left out, once units are made.
        footers: Footers that were read before, by path.
    """

    columns: Sequence[str] | None = None
    exprs: tuple[Expr, ...] = ()
    known: Any = None
    footers: dict[str, Any] = dataclasses.field(default_factory=dict)

    def schema(self) -> Any:
        """Return the schema, of the footers of some files and the folders' names."""
        schema = self._finished_schema(together("Parquet", self.schemas(self._some_files())))
        names = schema.names if self.columns is None else self.columns
        return pa.schema([schema.field(name) for name in names])

    def _some_files(self) -> Sequence[tuple[str, int]]:
        """Return some files, from the first to the last: columns come and go in time."""
        count = len(self.found)
        return [self.found[n] for n in np.linspace(0, count - 1, min(count, _READERS), dtype=int)]

    def schemas(self, files: Sequence[tuple[str, int]]) -> list[tuple[str, Any]]:
        """Return the paths and schemas of files, as their footers say."""
        return [(path, each.schema.to_arrow_schema()) for path, each in self._footers(files)]

    def _finished_schema(self, schema: Any) -> Any:
        """Return the schema of rows of files with this one; columns of paths are text, or null."""
        schema = from_file(no_rows(schema)).schema
        further = [(name, pa.string()) for name in self.folders if name not in schema.names]
        return pa.schema([*schema, *further], schema.metadata)

    @property
    def counted(self) -> bool:  # type: ignore[override]
        return not self.exprs

    def count(self) -> int | None:
        """Return the number of rows from the footers; None if rows are left out."""
        if not self.counted:
            return None
        return int(sum(footer.num_rows for _, footer in self._footers(self.found)))

    def selected(self, columns: Sequence[str]) -> ParquetDatasource:
        """Return a source of these columns; those that it lacks are an error."""
        known = self.schema().names
        missing = [name for name in columns if name not in known]
        if missing:
            raise ValueError(
                f"{self.found[0][0]} has no column {missing[0]!r}, but {', '.join(known)}."
            )
        return dataclasses.replace(self, columns=tuple(columns))

    def pushed(self, step: Transform) -> ParquetDatasource | None:
        match step:
            case Columns(method="select", names=names):
                return self.selected(list(names))
            case FilterExpr(expr=expr) if self.columns is None:
                if expr.columns() <= set(self.schema().names):
                    return dataclasses.replace(self, exprs=(*self.exprs, expr))
        return None

    # --- units ----------------------------------------------------------------------------

    def units(self, wish: CutWish) -> Iterator[ReadUnit]:
        """Yield units: some rows of a row group, or several small row groups together."""
        some = self.found if self.exprs else self._some_files()
        known = all(path in self.footers for path, _ in self.found)
        seen = together("Parquet", self.schemas(self.found if known else some))
        groups = list(self._groups(some, seen)) or list(self._groups(some := self.found, seen))
        share = len(self.found) / len(some)
        rows = int(share * sum(rows for _, (_, rows, _) in groups))
        total = int(share * sum(size for _, (_, _, size) in groups))
        each = wish.rows_each(rows, total) if rows else 1
        # The end of a row group is decoded with its beginning: groups are cut for functions only,
        # and large ones so that each CPU has a part: parts are four for each.
        parts = max(1, wish.parts // 4) if total > _LARGE * share * len(groups) else wish.parts
        step = max(each, CutWish(1, parts, wish.least).rows_each(rows, 0))
        whole = groups if share == 1 else self._groups(self.found, seen)
        most = min(each, wish.most)
        for own in bunched(whole, lambda found: found[1][1], most):
            source = own[-1][0]  # it has the columns of those before
            yield from source.cut([group for _, group in own], most, each, step)

    def _groups(
        self, files: Sequence[tuple[str, int]], seen: Any
    ) -> Iterator[tuple[ParquetDatasource, tuple[Piece, int, int]]]:
        """Yield the row groups of files, as ``cut`` takes them, each with the source that reads it.

        ``seen`` is the schema of some files; with further columns of others, a new source begins.
        """
        first, source = self.found[0][0], None
        for path, footer in self._footers(files):
            schema = together("Parquet", [(first, seen), (path, footer.schema.to_arrow_schema())])
            if source is None or not schema.equals(seen):
                seen, known = schema, self._finished_schema(schema)
                columns = known.names if self.columns is None else self.columns
                source = dataclasses.replace(self, columns=columns, known=known, footers={})
            for number, group in enumerate(map(footer.row_group, range(footer.num_row_groups))):
                if group.num_rows and (self.counted or self._may_match(group)):
                    piece = Piece(path, 0, group.num_rows, number)
                    yield source, (piece, group.num_rows, _decoded(group, source.used))

    def of_parts(self, path: str, size: int) -> ParquetDatasource:
        return self

    def _may_match(self, group: Any) -> bool:
        """Return False if the statistics of a row group say that no row passes the filter."""
        columns = map(group.column, range(group.num_columns))
        statistics = {column.path_in_schema: column.statistics for column in columns}
        for name, function, value in itertools.chain.from_iterable(map(comparisons, self.exprs)):
            known = statistics.get(name)
            if known is not None and function in _POSSIBLE:
                # Reading may bring types together; Python has no times as far away as Arrow.
                with contextlib.suppress(TypeError, OverflowError):
                    if {type(value), type(known.min)} == {float, decimal.Decimal}:
                        continue  # Arrow compares them as floats, Python exactly
                    if not _POSSIBLE[function](value, known.min, known.max):
                        return False
        return True

    def _footers(self, files: Iterable[tuple[str, int]]) -> Iterator[tuple[str, Any]]:
        """Yield paths and footers of files; those not read before are read some at once."""

        def read(path: str) -> None:
            with self.open(path) as file:
                self.footers[path] = file.metadata

        with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
            for some in bunched(files, lambda _: 1, _AHEAD):
                missing = [path for path, _ in some if path not in self.footers]
                list((pool.map if len(missing) > 1 else map)(read, missing))
                yield from ((path, self.footers[path]) for path, _ in some)

    # --- reading --------------------------------------------------------------------------

    @property
    def used(self) -> set[str]:
        """The columns that come out or that rows are chosen by."""
        return set(self.columns or ()).union(*(expr.columns() for expr in self.exprs))

    def open(self, path: str) -> Any:
        """Open a file.

        Raises:
            DataError: The file is not a Parquet file, or is not there any more.
        """
        try:
            if is_local(self.filesystem):
                # By pyarrow itself, without the interpreter, and a part at a time: else it holds
                # a whole row group.
                return pq.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
            return pq.ParquetFile(self.filesystem.open(path, "rb"))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path} can't be read as Parquet: {error}") from error

    def read(self, file: Any, piece: Piece) -> Iterator[Any]:
        used = self.used
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
            columns=[name for name in file.schema_arrow.names if name in used],
            use_threads=False,
        )
        tables = (pa.Table.from_batches([batch]) for batch in batches)
        for table in between(tables, piece.start, piece.stop):
            yield self._finished(table, piece.path)

    def _finished(self, table: Any, path: str) -> Any:
        """Return rows of a file with the columns that come out, null where the file has none.

        Their types are those of all files together, but of ragged tensors those of the file.
        """
        table = self.beside(table, path)
        ragged = {field.name for field in self.known if isinstance(field.type, Ragged | Pickled)}
        others = self.used - ragged.intersection(table.column_names)
        wanted = pa.schema([field for field in self.known if field.name in others])
        if not table.schema.equals(wanted):
            table = concat([no_rows(wanted), table])
        for expr in self.exprs:
            with told(f"Filter({expr!r})", Where(path)):
                table = table.filter(expr.values(table))
        return table.select(self.columns)


def _decoded(group: Any, names: set[str]) -> int:
    """Return about how many bytes columns of a row group take in memory."""
    return sum(chunk.total_uncompressed_size for chunk in _chunks(group, names))


def _chunks(group: Any, names: set[str]) -> list[Any]:
    """Return what a row group's metadata says of columns, whose names may have dots."""
    chunks = map(group.column, range(group.num_columns))
    return [chunk for chunk in chunks if names.intersection(_beginnings(chunk.path_in_schema))]


def _beginnings(path: str) -> Iterator[str]:
    """Yield "a", "a.b" and "a.b.c" of "a.b.c"."""
    return itertools.accumulate(path.split("."), "{}.{}".format)
