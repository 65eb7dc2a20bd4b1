"""The functions that make datasets: of files, of numbers, of data in memory."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from miniray.data.batches import check_whole
from miniray.data.blocks import batch_to_table
from miniray.data.dataset import Dataset, MaterializedDataset
from miniray.data.files import (
    BINARY,
    CSV,
    IMAGES,
    JSON,
    NUMPY,
    TEXT,
    FileKind,
    FilesDatasource,
    checked_options,
    find_files,
    folder_columns,
)
from miniray.data.parquet import PARQUET, ParquetDatasource
from miniray.data.plan import Read
from miniray.data.rearranged import drawn
from miniray.data.sources import (
    BlockRows,
    Numbers,
    ReadUnit,
    UnitsDatasource,
    item_row,
    items_to_table,
    tables_of_items,
)
from miniray.data.tables import concat
from miniray.data.transforms import MapBatches, Udf

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def _of_tables(caller: str, name: str, tables: Sequence[Any], options: Any) -> Dataset:
    checked_options(caller, options, ())
    schema = concat([table.slice(0, 0) for table in tables]).schema
    units = list(map(BlockRows.unit, tables))
    return Dataset(Read(UnitsDatasource(units, schema if schema.names else None, name=name)))


def _numbers(caller: str, n: Any, shape: Sequence[int] | None, options: Any) -> Dataset:
    checked_options(caller, options, ())
    n = check_whole(caller, "n", n, 0)
    numbers = Numbers(n, None if shape is None else tuple(shape))
    schema = next(numbers.tables(0, 0)).schema
    unit = ReadUnit(numbers, n, n * 8 * math.prod(shape or (1,)))
    return Dataset(Read(UnitsDatasource([unit], schema, name="ReadRange")))


def range(n: int, **options: Any) -> Dataset:
    """Return the numbers from 0 up to, without, n, in the column "id"."""
    return _numbers("range", n, None, options)


def range_tensor(n: int, *, shape: Sequence[int] = (1,), **options: Any) -> Dataset:
    """Return n tensors of a shape in the column "data", each filled with its number."""
    return _numbers("range_tensor", n, shape, options)


def from_items(items: Sequence[Any], **options: Any) -> Dataset:
    """Return a row for each item: a dictionary as it is, others in the column "item"."""
    return _of_tables("from_items", "FromItems", [items_to_table(items)], options)


def from_arrow(tables: Any, **options: Any) -> Dataset:
    """Return the rows of a ``pyarrow.Table``, or of several."""
    given = tables if isinstance(tables, list | tuple) else [tables]
    return _of_tables("from_arrow", "FromArrow", list(map(batch_to_table, given)), options)


def from_pandas(dfs: Any, **options: Any) -> Dataset:
    """Return the rows of a ``pandas.DataFrame``, or of several."""
    return from_arrow(dfs, **options)


def from_numpy(ndarrays: Any) -> Dataset:
    """Return a row in the column "data" for each entry of the first axis of arrays."""
    found = ndarrays if isinstance(ndarrays, list | tuple) else [ndarrays]
    return from_arrow([{"data": array} for array in found])


def from_blocks(blocks: Sequence[Any]) -> Dataset:
    """Return the rows of tables or DataFrames."""
    return from_arrow(list(blocks))


def from_arrow_refs(tables: Any) -> Dataset:
    """Return the rows of tables in the object store."""
    found = tables if isinstance(tables, list | tuple) else [tables]
    units = [ReadUnit(BlockRows(), refs=(ref,)) for ref in found]
    return MaterializedDataset(Read(UnitsDatasource(units)))


def from_pandas_refs(dfs: Any) -> Dataset:
    """Return the rows of DataFrames in the object store."""
    return from_arrow_refs(dfs)


def from_numpy_refs(ndarrays: Any) -> Dataset:
    """Return the rows of arrays in the object store, in the column "data"."""
    from miniray.api import get

    found = ndarrays if isinstance(ndarrays, list | tuple) else [ndarrays]
    return from_numpy(get(list(found)))


def from_torch(dataset: Any, *, local_read: bool = False) -> Dataset:
    """Return the items of a dataset, as ``from_items`` does.

    With ``__len__`` and ``__getitem__`` it is read by several tasks, otherwise by one;
    ``local_read`` is accepted as in Ray.
    """
    from miniray.api import get, put

    if not hasattr(dataset, "__len__"):
        return from_items([None]).flat_map(lambda _: map(item_row, dataset))
    items = put(dataset)

    def read(batch: Any) -> Iterator[Any]:
        return tables_of_items(get(items), batch["id"].tolist())

    step = MapBatches("FromTorch", Udf(read), changes_count=False)
    return range(len(dataset))._apply(step)


def from_huggingface(dataset: Any, **options: Any) -> Dataset:
    """Return the rows of a dataset of Hugging Face: its Arrow tables, or read in tasks.

    Those that have to be decoded, as images, are read by several tasks; one without a length by
    one.
    """
    checked_options("from_huggingface", options, ())
    if isinstance(dataset, dict):
        raise TypeError(f"from_huggingface() takes one dataset, and not {list(dataset)}.")
    if not hasattr(dataset, "__len__") or must_be_decoded(dict(dataset.features)):
        return from_torch(dataset)
    return from_arrow(dataset.with_format("arrow")[:])  # files that tasks may not have are mapped


def must_be_decoded(feature: Any) -> bool:
    """Return whether values of a Hugging Face feature, as images, are not what Arrow holds."""
    inner = feature.values() if isinstance(feature, dict) else feature
    if not isinstance(feature, dict | list | tuple):
        inner = [feature.feature] if hasattr(feature, "feature") else []
    return hasattr(feature, "decode_example") or any(map(must_be_decoded, inner))


def _read(
    caller: str,
    kind: FileKind,
    paths: Any,
    /,
    *,
    filesystem: Any = None,
    include_paths: bool = False,
    shuffle: str | None = None,
    file_extensions: Any = ...,
    ignore_missing_paths: bool = False,
    arrow_open_stream_args: Any = None,
    **options: Any,
) -> Read:
    found = checked_options(caller, options, filter(None, [kind.table, _read]))
    found = {name: value for name, value in found.items() if value is not None}
    if shuffle not in (None, "files"):
        raise ValueError(f"{caller}(shuffle={shuffle!r}) must be 'files' or None.")
    ends = kind.extensions if file_extensions is ... else file_extensions
    ends = [ends] if isinstance(ends, str) else ends
    ends = ends and tuple(f".{each.lstrip('.').lower()}" for each in ends)
    fs, files = find_files(paths, filesystem, ends, kind.called, some=ignore_missing_paths)
    if shuffle:
        np.random.default_rng(drawn(caller, None)).shuffle(files)
    source = ParquetDatasource if kind is PARQUET else FilesDatasource
    columns = folder_columns(files) if kind in (PARQUET, CSV, JSON) else []
    columns += ["path"] if include_paths else []
    codec = (arrow_open_stream_args or {}).get("compression")
    return Read(source(kind, fs, found, columns, files, kind.name, codec))


def read_parquet(
    paths: Any,
    *,
    filesystem: Any = None,
    columns: str | Sequence[str] | None = None,
    filter: Any = None,
    include_paths: bool = False,
    shuffle: str | None = None,
    **options: Any,
) -> Dataset:
    """Read Parquet files.

    Args:
        paths: A path or several: files, folders or patterns, local or as URLs. Folders named
            ``key=value`` become columns of text.
        filesystem: Of fsspec or pyarrow. Default: it follows from the paths.
        columns: Read only these; as ``select_columns``.
        filter: An expression; as ``filter(expr=)``.
        include_paths: Add the column "path".
        shuffle: "files": read the files in a random order.
        **options: ``file_extensions``: how names of files in folders end; None: anyhow.
            ``ignore_missing_paths``: leave out paths at which there is nothing, unless that is all.
            Arguments of Ray that only advise, such as ``override_num_blocks``.

    Raises:
        FileNotFoundError: There is no file at a path.
        ValueError: A column is not there.
    """
    options |= {"filesystem": filesystem, "include_paths": include_paths, "shuffle": shuffle}
    read = _read("read_parquet", PARQUET, paths, **options)
    assert isinstance(read.source, ParquetDatasource)
    if columns is not None:
        names = [columns] if isinstance(columns, str) else list(columns)
        names += ["path"] if include_paths else []
        read = dataclasses.replace(read, source=read.source.selected(list(dict.fromkeys(names))))
    return Dataset(read) if filter is None else Dataset(read).filter(expr=filter)


def read_csv(paths: Any, **options: Any) -> Dataset:
    """Read CSV files with a header each; large ones by several tasks.

    Paths and options are as of ``read_parquet``, but for ``columns`` and ``filter``. Files whose
    names end with ``.gz``, ``.bz2``, ``.br``, ``.lz4`` or ``.zst`` are decompressed; others with
    ``arrow_open_stream_args={"compression": "gzip"}``. With ``read_options``, ``parse_options`` or
    ``convert_options`` of ``pyarrow.csv``, each file is read by one task. Values with line breaks
    need ``ParseOptions(newlines_in_values=True)``.
    """
    return Dataset(_read("read_csv", CSV, paths, **options))


def read_json(
    paths: Any, *, lines: bool | None = None, read_options: Any = None, **options: Any
) -> Dataset:
    """Read JSON files: an object in each line, or one list of objects.

    Arguments are as of ``read_csv``, but ``parse_options`` is of ``pyarrow.json``. ``lines`` and
    ``read_options`` are accepted as in Ray: which of both it is can be seen.
    """
    return Dataset(_read("read_json", JSON, paths, **options))


def read_text(paths: Any, **options: Any) -> Dataset:
    """Read lines of text into the column "text".

    Further arguments are ``encoding`` ("utf-8"), ``drop_empty_lines`` (True), and those of
    ``read_csv`` but for those of ``pyarrow``; as they are in later calls here. Folders make no
    columns.
    """
    return Dataset(_read("read_text", TEXT, paths, **options))


def read_images(paths: Any, **options: Any) -> Dataset:
    """Read images into the column "image", as arrays of height, width and channels.

    Further arguments are ``size``, the (height, width) to scale to, and ``mode``, one of Pillow
    such as "RGB".
    """
    size = options.get("size")
    if size is not None and (np.shape(size) != (2,) or min(size) < 1):
        raise ValueError(f"read_images(size={size!r}) must be (height, width), in pixels.")
    return Dataset(_read("read_images", IMAGES, paths, **options))


def read_numpy(paths: Any, **options: Any) -> Dataset:
    """Read ``.npy`` files: a row in the column "data" for each entry of the first axis."""
    return Dataset(_read("read_numpy", NUMPY, paths, **options))


def read_binary_files(paths: Any, **options: Any) -> Dataset:
    """Read each file as a row, with its contents in the column "bytes"."""
    return Dataset(_read("read_binary_files", BINARY, paths, **options))
