"""Parquet files: read by row groups, with the columns and rows that are needed only."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from miniray.data.blocks import from_file
from miniray.data.expressions import Expr, comparisons, full
from miniray.data.files import bunched, find_files, is_local, partitions, with_path
from miniray.data.sources import Content, Datasource, ReadUnit, between
from miniray.data.transforms import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from miniray.data.sources import CutWish

#: Files whose footers are read at once.
_READERS = 16
#: Rows that are decoded at once, at most, and about how many bytes.
_ROWS, _BYTES = 131_072, 16 * 2**20
#: Bytes of each column of a local file that are read at once.
_BUFFER = 2**20


@dataclasses.dataclass(frozen=True)
class Selection:
    """What is read of each file.

    Attributes:
        filesystem: Where they are.
        columns: The names of the columns; None: all.
        expr: Leaves out rows; None: none.
        schema: What all files have; the partitions' columns are not in it.
        paths: Whether the column "path" is added.
    """

    filesystem: Any
    columns: Sequence[str] | None = None
    expr: Expr | None = None
    schema: Any = None
    paths: bool = False

    def open(self, path: str) -> Any:
        """Open a file.

        Raises:
            DataError: It is no Parquet file.
        """
        try:
            # pyarrow reads local files by itself, without the interpreter.
            local = is_local(self.filesystem)
            if local:  # a part at a time: else Arrow holds a whole row group
                return pq.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
            return pq.ParquetFile(self.filesystem.open(path, "rb"))
        except pa.ArrowInvalid as error:
            raise DataError(f"{path} is not a Parquet file: {error}") from error


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows of a row group."""

    path: str
    group: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class ParquetRows(Content):
    """Pieces of files, read one after another."""

    wanted: Selection
    pieces: tuple[Piece, ...]

    @property
    def label(self) -> str:
        first = self.pieces[0]
        if len(self.pieces) == 1:
            return f"{first.path} (row group {first.group}, from row {first.start})"
        return f"{first.path} and what follows it (row groups: {len(self.pieces)})"

    def tables(self, start: int, stop: int, *values: Any) -> Iterator[Any]:
        if self.wanted.expr is not None:  # only reading tells which row has which number
            yield from between(self._read_all(self.pieces), start, stop)
        else:
            yield from self._read_all(_range_of(self.pieces, start, stop))

    def _read_all(self, pieces: Iterable[Piece]) -> Iterator[Any]:
        for path, own in itertools.groupby(pieces, key=lambda piece: piece.path):
            file = self.wanted.open(path)
            for piece in own:
                yield from self._read(file, piece)

    def _read(self, file: Any, piece: Piece) -> Iterator[Any]:
        wanted = self.wanted
        stored = file.schema_arrow.names
        columns = wanted.columns
        if columns is not None:
            used = {*columns, *(wanted.expr.columns() if wanted.expr is not None else ())}
            columns = [name for name in stored if name in used]
        at = 0
        group = file.metadata.row_group(piece.group)
        few = _BYTES * group.num_rows // max(1, _decoded(group, columns))
        try:
            for batch in file.iter_batches(
                max(1, min(_ROWS, few, piece.stop)),
                row_groups=[piece.group],
                columns=columns,
                use_threads=False,
            ):
                low, high = max(piece.start - at, 0), min(piece.stop - at, batch.num_rows)
                at += batch.num_rows
                if low < high:
                    table = pa.Table.from_batches([batch.slice(low, high - low)])
                    yield self._finished(table, piece.path)
                if at >= piece.stop:
                    return
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{piece.path}, row group {piece.group}: {error}") from error

    def _finished(self, table: Any, path: str) -> Any:
        wanted = self.wanted
        table = from_file(table)
        if wanted.schema is not None and table.schema.names != wanted.schema.names:
            table = _with_missing(table, wanted.schema, wanted)
        table = with_path(table, path, _partition_values(path), include=wanted.paths)
        if wanted.expr is not None:
            table = table.filter(full(wanted.expr.evaluate(table), table.num_rows))
        return table.select(list(wanted.columns)) if wanted.columns is not None else table


def _range_of(pieces: Iterable[Piece], start: int, stop: int) -> Iterator[Piece]:
    """Yield what has a range of the rows of pieces."""
    for piece in pieces:
        rows = piece.stop - piece.start
        low, high = piece.start + max(start, 0), piece.start + min(stop, rows)
        if low < high:
            yield dataclasses.replace(piece, start=low, stop=high)
        start, stop = start - rows, stop - rows


def _with_missing(table: Any, schema: Any, wanted: Selection) -> Any:
    """Add the columns that other files have, as null."""
    filtered = wanted.expr.columns() if wanted.expr is not None else ()
    used = {*(wanted.columns or ()), *filtered}
    for field in schema:
        needed = wanted.columns is None or field.name in used
        if field.name not in table.column_names and needed:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    names = [name for name in schema.names if name in table.column_names]
    return table.select(names)


def _partition_values(path: str) -> Mapping[str, Any]:
    return {
        name: int(value) if value.isdigit() else value for name, value in partitions(path).items()
    }


class Footer(NamedTuple):
    """The metadata and the Arrow schema of a Parquet file."""

    metadata: Any
    schema: Any


class ParquetDatasource(Datasource):
    """Parquet files. Their footers are read when units are made, except for the first one's.

    Args:
        files: Paths and sizes.
        wanted: What is read of them.
        footers: Those that were read before, by path.
    """

    name = "ReadParquet"

    def __init__(
        self,
        files: Sequence[tuple[str, int]],
        wanted: Selection,
        footers: dict[str, Footer] | None = None,
    ) -> None:
        self._files = files
        self._wanted = wanted
        self._footers: dict[str, Footer] = {} if footers is None else footers

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_footers": {}}

    def schema(self) -> Any:
        """Return the schema, of the first footer and the folders' names."""
        first = self._files[0][0]
        schema = from_file(self._footer(first).schema.empty_table())
        values = _partition_values(first)
        schema = with_path(schema, first, values, include=self._wanted.paths)
        columns = self._wanted.columns
        return schema.schema if columns is None else schema.select(list(columns)).schema

    def files(self) -> list[str]:
        return [path for path, _ in self._files]

    def count(self) -> int | None:
        """Return the number of rows from the footers; None if rows are left out."""
        if self._wanted.expr is not None:
            return None
        return int(sum(footer.metadata.num_rows for footer in self._all_footers()))

    def selected(self, columns: Sequence[str]) -> Datasource | None:
        """Return a source of these columns; those that it lacks are an error."""
        known = self.schema().names
        missing = [name for name in columns if name not in known]
        if missing:
            raise ValueError(
                f"{self._files[0][0]} has no column {missing[0]!r}, but {', '.join(known)}."
            )
        return self._with(columns=tuple(columns))

    def filtered(self, expr: Expr) -> Datasource | None:
        """Return a source that leaves out the rows for which the expression is not true."""
        if not expr.columns() <= set(self.schema().names) or self._wanted.columns is not None:
            return None
        both = expr if self._wanted.expr is None else self._wanted.expr & expr
        return self._with(expr=both)

    def _with(self, **changes: Any) -> ParquetDatasource:
        wanted = dataclasses.replace(self._wanted, **changes)
        return ParquetDatasource(self._files, wanted, self._footers)

    def units(self, wish: CutWish) -> Iterator[ReadUnit]:
        """Yield units: some rows of a row group, or several small row groups together."""
        wanted = self._wanted
        footers = self._all_footers()
        schema = _unified([(p, f.schema) for (p, _), f in zip(self._files, footers, strict=True)])
        schema = from_file(schema.empty_table()).schema
        wanted = dataclasses.replace(wanted, schema=schema)
        groups = [
            (Piece(path, group, 0, metadata.row_group(group).num_rows), metadata.row_group(group))
            for (path, _), (metadata, _) in zip(self._files, footers, strict=True)
            for group in range(metadata.num_row_groups)
            if metadata.row_group(group).num_rows and self._may_match(metadata.row_group(group))
        ]
        sizes = [_decoded(group, wanted.columns) for _, group in groups]
        rows = sum(piece.stop for piece, _ in groups)
        step = wish.rows_each(rows, sum(sizes)) if rows else 1
        # Who reads the end of a row group decodes its beginning too: only for functions' sake.
        cut = max(step, dataclasses.replace(wish, target=sum(sizes) + 1).rows_each(rows, 0))
        for some in bunched(zip(groups, sizes, strict=True), lambda each: each[0][0].stop, step):
            piece, size = some[0][0][0], sum(size for _, size in some)
            if piece.stop <= step:
                yield _unit(wanted, tuple(each for (each, _), _ in some), size)
                continue
            for start in range(0, piece.stop, cut):  # a row group that is larger is alone
                part = dataclasses.replace(piece, start=start, stop=min(start + cut, piece.stop))
                yield _unit(wanted, (part,), size * (part.stop - start) // piece.stop)

    def _may_match(self, group: Any) -> bool:
        """Return False if the statistics of a row group say that no row passes the filter."""
        if self._wanted.expr is None:
            return True
        statistics = {}
        for index in range(group.num_columns):
            column = group.column(index)
            if column.statistics is not None and column.statistics.has_min_max:
                statistics[column.path_in_schema] = column.statistics
        for name, function, value in comparisons(self._wanted.expr):
            found = statistics.get(name)
            if found is not None and not _possible(function, value, found.min, found.max):
                return False
        return True

    def _footer(self, path: str) -> Footer:
        if path not in self._footers:
            with self._wanted.open(path) as file:
                self._footers[path] = Footer(file.metadata, file.schema_arrow)
        return self._footers[path]

    def _all_footers(self) -> list[Footer]:
        missing = [path for path, _ in self._files if path not in self._footers]
        if len(missing) > 1:
            with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
                list(pool.map(self._footer, missing))
        return [self._footer(path) for path, _ in self._files]


def _unit(wanted: Selection, pieces: tuple[Piece, ...], size: int) -> ReadUnit:
    rows = sum(piece.stop - piece.start for piece in pieces) if wanted.expr is None else None
    return ReadUnit(ParquetRows(wanted, pieces), rows, size)


def _possible(function: str, value: Any, least: Any, most: Any) -> bool:
    try:
        return bool(
            {
                "equal": lambda: least <= value <= most,
                "less": lambda: least < value,
                "less_equal": lambda: least <= value,
                "greater": lambda: most > value,
                "greater_equal": lambda: most >= value,
            }.get(function, lambda: True)()
        )
    except TypeError:
        return True


def _decoded(group: Any, columns: Sequence[str] | None) -> int:
    """Return about how many bytes a row group takes in memory."""
    size = 0
    for index in range(group.num_columns):
        column = group.column(index)
        if columns is None or column.path_in_schema.partition(".")[0] in columns:
            size += column.total_uncompressed_size
    return size


def _unified(found: Sequence[tuple[str, Any]]) -> Any:
    """Return what the files have together, or name two that do not go together."""
    first_path, schema = found[0]
    for path, other in found[1:]:
        if other.equals(schema):
            continue
        try:
            schema = pa.unify_schemas([schema, other], promote_options="permissive")
        except pa.ArrowException as error:
            raise DataError(
                f"The Parquet files {first_path} and {path} do not go together: {error}"
            ) from error
    return schema


def parquet_source(
    paths: Any, filesystem: Any, columns: Sequence[str] | None, *, include_paths: bool
) -> ParquetDatasource:
    """Return the source of Parquet files at paths."""
    found, files = find_files(paths, filesystem, [".parquet", ".pq"], "Parquet")
    source = ParquetDatasource(files, Selection(found, paths=include_paths))
    if columns is not None:
        selected = source.selected([*columns, *(["path"] if include_paths else [])])
        assert isinstance(selected, ParquetDatasource)
        return selected
    return source
