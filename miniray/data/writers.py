"""Files that are written by tasks: named by the unit, written aside, and renamed when whole."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import io
import itertools
import json
import secrets
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from miniray.data.aggregate import ROWS, grouped_by
from miniray.data.batches import check_whole
from miniray.data.blocks import Pickled, no_columns, to_numpy, values_of
from miniray.data.context import DataContext
from miniray.data.files import NULL, checked_options, is_local, resolve
from miniray.data.ordered import key_table
from miniray.data.plan import Regroup, Stage
from miniray.data.rearranged import key_names, known_columns
from miniray.data.tables import gathered, rebatched
from miniray.data.transforms import DataError, Transform, check_columns, told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from miniray.data.transforms import Where

#: Files that are removed at once.
_REMOVERS = 16
_MODES = ("append", "create", "overwrite", "ignore", "error")
IMAGES = ("png", "jpg", "jpeg", "bmp", "tiff", "webp")


def _write_json(
    table: Any, sink: Any, *, ensure_ascii: bool = True, allow_nan: bool = False
) -> None:
    """Write the rows of a table, which has some, as JSON; options are as of ``json.dumps``.

    NaN and infinity are null if they are not allowed: JSON has none.
    """
    columns = []
    for values in table.columns:
        nested = pa.types.is_nested(values.type) or isinstance(values.type, pa.BaseExtensionType)
        given = {"nested": nested, "ensure_ascii": ensure_ascii, "allow_nan": allow_nan}
        columns.append(_json_cells(values_of(values), **given))
    named = (json.dumps(name, ensure_ascii=ensure_ascii) for name in table.column_names)
    row = ", ".join(f"{name.replace('%', '%%')}: %s" for name in named)
    line = f"{{{row}}}\n"
    rows = zip(*columns, strict=True) if columns else [()] * len(table)
    sink.writelines((line % cells).encode() for cells in rows)


def _json_cells(cells: list[Any], *, nested: bool, **given: Any) -> list[str]:
    try:
        if nested:
            return list(map(json.JSONEncoder(default=_plain, **given).encode, cells))
        # At once: there is no other line end in JSON.
        return json.dumps(cells, separators=("\n", ":"), default=_plain, **given)[1:-1].split("\n")
    except ValueError:
        plain = json.loads(json.dumps(cells, default=_plain), parse_constant=lambda _: None)
        return _json_cells(plain, nested=nested, **{**given, "allow_nan": True})


#: The writer of each kind of files, and other functions that take its options.
_OPTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "parquet": (pq.write_table, pq.ParquetWriter),
    "csv": (pyarrow.csv.write_csv,),
    "json": (_write_json,),
}


@dataclasses.dataclass(frozen=True)
class Writer(Transform):
    """Writes blocks as files, and gives as many rows without columns.

    Attributes:
        kind: The end of the files' names: "parquet", "csv", "json", "npy" or one of images.
        filesystem: Of fsspec.
        first: Number of the first file, behind those that are there.
        token: Behind each number: two that append at the same time write different files.
        column: The only column that is written, for arrays and images.
        partition_cols: Columns whose values name folders.
        size: Bytes that a file has at least, if small tables can be written together.
        options: Makes those of what writes the format: some can't be pickled.
    """

    name: str
    kind: str
    filesystem: Any
    folder: str
    first: int
    token: str
    column: str
    partition_cols: tuple[str, ...]
    size: int
    options: Callable[[], Mapping[str, Any]]
    user = True
    keeps_count = False

    @property
    def spreads(self) -> bool:  # type: ignore[override]
        return self.kind in IMAGES

    def run(self, tables: Iterator[Any], where: Where) -> Iterator[Any]:
        """Write small tables together, and yield how many rows were written."""
        numbers = itertools.count()
        for table in filter(len, gathered(tables, self.size)):
            with told(self.name, where):
                self._write(table, numbers, where)
            rows = len(table)
            del table  # before the next one is made
            yield no_columns(rows)

    def _write(self, table: Any, numbers: Iterator[int], where: Where) -> None:
        for folder, part in self._partitioned(table):
            for rows in rebatched([part], 1) if self.kind in IMAGES else (part,):
                place = f"{self.first + where.index:06d}-{next(numbers):06d}{self.token}"
                path = f"{folder}/{place}.{self.kind}"
                self._store(path, rows, where)

    def _partitioned(self, table: Any) -> Iterator[tuple[str, Any]]:
        if not self.partition_cols:
            yield self.folder, table
            return
        found = key_table(table, self.partition_cols, self.name)
        rest = table.drop_columns(list(self.partition_cols)).combine_chunks()
        if not rest.num_columns:
            raise DataError(f"{self.name}: partition_cols leaves no column for the files.")
        groups = grouped_by(found, self.partition_cols)
        columns = [groups.column(name).cast(pa.string()) for name in self.partition_cols]
        texts = (column.fill_null(NULL).to_pylist() for column in columns)
        for rows, *values in zip(groups.column(ROWS), *texts, strict=True):
            pairs = zip(self.partition_cols, values, strict=True)
            named = (f"{name}={quote(value, safe='')}" for name, value in pairs)
            yield "/".join([self.folder, *named]), rest.take(rows.values)

    def _fill(self, sink: Any, table: Any, where: Where) -> None:
        """Write the contents of the file for a table; an image is for one of a single row."""
        if self.column:
            check_columns(f"{self.name}: {where.label}", [self.column], table)
        elif pickled := [field.name for field in table.schema if isinstance(field.type, Pickled)]:
            raise DataError(
                f"{self.name}: the column {pickled[0]!r} of {where.label} has Python objects: drop "
                f"or convert it."
            )
        if self.kind in _OPTIONS:
            _OPTIONS[self.kind][0](table, sink, **self.options())
        elif self.kind == "npy":
            np.save(sink, to_numpy(table.column(self.column)), allow_pickle=False)
        else:
            from PIL import Image

            (image,) = to_numpy(table.column(self.column))
            Image.fromarray(image).save(sink, format=self.kind.replace("jpg", "jpeg"))

    def _store(self, path: str, table: Any, where: Where) -> None:
        """Write the file for a table so that it is there whole or not at all."""
        fs, local = self.filesystem, is_local(self.filesystem)
        folder, _, name = path.rpartition("/")
        aside = f"{folder}/.{name}.part" if local else path
        try:
            fs.makedirs(folder, exist_ok=True)
            with open(aside, "wb") if local else io.BytesIO() as sink:  # noqa: PTH123
                self._fill(sink, table, where)
                if isinstance(sink, io.BytesIO):  # a file that is open there may be kept in part
                    fs.pipe_file(path, sink.getvalue())
            if local:
                fs.mv(aside, path)
        except BaseException as error:  # a cancelled call leaves no part behind either
            with contextlib.suppress(OSError):
                fs.rm_file(aside)
            if not isinstance(error, OSError):
                raise
            text = f"{self.name}: {path} can't be written: {error} ({where.label})"
            raise DataError(text) from error


def _plain(value: Any) -> Any:
    """Return what JSON has for a value; UnicodeDecodeError for bytes that are no text."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, datetime.datetime):  # readers take those without fractions for times
        unit = "nanoseconds" if hasattr(value, "nanosecond") else "microseconds"
        return value.isoformat(" ", unit)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def write(
    dataset: Any,
    kind: str,
    path: str,
    /,
    *,
    filesystem: Any = None,
    mode: str = "append",
    min_rows_per_file: int | None = None,
    max_rows_per_file: int | None = None,
    column: str = "",
    partition_cols: Sequence[str] | None = None,
    **options: Any,
) -> None:
    """Write a dataset as files below a folder.

    Raises:
        TypeError: There is no such option.
        ValueError: A value makes no sense, or mode="create" and there are files.
    """
    caller = f"write_{'numpy' if kind == 'npy' else 'images' if kind in IMAGES else kind}"
    if mode not in _MODES:
        raise ValueError(f"{caller}(mode={mode!r}) must be one of {', '.join(_MODES)}.")
    late = options.pop(f"arrow_{kind}_args_fn", None) or dict
    further = checked_options(caller, options, (*_OPTIONS.get(kind, ()), write))
    fs, folder = resolve(path, filesystem)
    there = list(fs.find(folder)) if fs.exists(folder) else []
    if there and mode in ("create", "error"):
        raise ValueError(f"{caller}(mode={mode!r}): there are files in {path!r}.")
    if there and mode == "ignore":
        return
    token = f"-{secrets.token_hex(4)}" if mode == "append" else ""
    known = known_columns(dataset._plan) if column or partition_cols else None
    key_names(caller, [column] if column else (), known)
    columns = key_names(caller, partition_cols or (), known)
    numbers = [name.rpartition("/")[2].partition("-")[0] for name in there]
    first = max((int(number) + 1 for number in numbers if number.isdigit()), default=0)
    below = dataset._plan
    bounds = {"min_rows_per_file": min_rows_per_file, "max_rows_per_file": max_rows_per_file}
    given = [check_whole(caller, n, rows, 1) for n, rows in bounds.items() if rows is not None]
    if given != sorted(given):
        raise ValueError(f"{caller}(): min_rows_per_file is above max_rows_per_file: {given}.")
    if given:
        below = Regroup((below,), given[-1], strict=max_rows_per_file is not None)
    folder, size = folder.rstrip("/"), DataContext.get_current().target_max_block_size

    def made() -> Mapping[str, Any]:
        return {**further, **late()}

    name = f"Write{kind.capitalize()}"
    writer = Writer(name, kind, fs, folder, first, token, column, columns, size, made)
    fs.makedirs(folder, exist_ok=True)
    for _ in dataset._units(Stage((below,), (writer,)), ordered=False):
        pass
    if mode == "overwrite":
        with concurrent.futures.ThreadPoolExecutor(_REMOVERS) as pool:
            list(pool.map(fs.rm_file, there))  # those of pyarrow take one at a time
