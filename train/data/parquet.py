"""Sources that read files row group by row group; metadata tell how many rows there are."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.train.data.sources import Source, TableRows

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

#: Files whose metadata are read at once.
_READERS = 16


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """A row group of a file."""

    path: str
    index: int
    rows: int


class ParquetSource(Source):
    """Parquet files. A rank holds one row group in memory, and what is read ahead.

    Args:
        paths: Local paths or URLs of files, folders or glob patterns.

    Raises:
        FileNotFoundError: There is no file at one of the paths.
        ValueError: The files have different columns, or one is no Parquet file.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self._filesystem, files = _find(paths)
        with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
            found = list(pool.map(lambda file: _describe(self._filesystem, file), files))
        self._check_columns(files, [schema for schema, _ in found])
        self._groups = [group for _, groups in found for group in groups if group.rows]

    @property
    def block_sizes(self) -> Sequence[int]:
        return [group.rows for group in self._groups]

    def open_block(self, block: int) -> TableRows:
        group = self._groups[block]
        with _open(self._filesystem, group.path) as file:
            # One column after another by one thread: training has the others.
            return TableRows(file.read_row_group(group.index, use_threads=False).combine_chunks())

    @staticmethod
    def _check_columns(files: Sequence[str], schemas: Sequence[Any]) -> None:
        for file, schema in zip(files, schemas, strict=True):
            if not schema.equals(schemas[0]):
                raise ValueError(
                    f"The Parquet files have different columns: {files[0]} has "
                    f"{_columns(schemas[0])}, and {file} has {_columns(schema)}."
                )


class FragmentSource(Source):
    """The files of a ``pyarrow.dataset.Dataset``, with its columns and partitions.

    Parquet is read row group by row group; other files are read whole, one at a time.

    Raises:
        ValueError: The dataset is filtered or projected, so that metadata do not tell its rows.
    """

    def __init__(self, dataset: Any) -> None:
        self._schema = dataset.schema
        blocks = [block for fragment in dataset.get_fragments() for block in _blocks(fragment)]
        self._blocks = [(fragment, rows) for fragment, rows in blocks if rows]

    @property
    def block_sizes(self) -> Sequence[int]:
        return [rows for _, rows in self._blocks]

    def open_block(self, block: int) -> TableRows:
        fragment, _ = self._blocks[block]
        table = fragment.to_table(schema=self._schema, use_threads=False)
        return TableRows(table.combine_chunks())


def _blocks(fragment: Any) -> list[tuple[Any, int]]:
    if hasattr(fragment, "row_groups"):
        return [
            (fragment.subset(row_group_ids=[group.id]), group.num_rows)
            for group in fragment.row_groups
        ]
    return [(fragment, fragment.count_rows())]


def _find(paths: Sequence[str | os.PathLike[str]]) -> tuple[Any, list[str]]:
    """Return the filesystem of the paths, and the files there, sorted within each path."""
    from miniray.train.storage.filesystem import resolve

    files: list[str] = []
    filesystems = []
    for given in paths:
        text = str(given)
        expanded = str(Path(text).expanduser()) if text.startswith("~") else text
        filesystem, path = resolve(expanded)
        filesystems.append(filesystem)
        if any(sign in path for sign in "*?["):
            found = sorted(filesystem.glob(path))
        elif filesystem.isdir(path):
            found = sorted(file for file in filesystem.find(path) if file.endswith(".parquet"))
        else:
            found = [path] if filesystem.exists(path) else []
        if not found:
            raise FileNotFoundError(f"There is no Parquet file at {text!r}.")
        files += found
    if any(filesystem != filesystems[0] for filesystem in filesystems):
        raise ValueError(f"The Parquet files are on different filesystems: {list(paths)}.")
    return filesystems[0], files


def _open(filesystem: Any, path: str) -> Any:
    import pyarrow.parquet

    from miniray.train.storage.filesystem import is_local

    # pyarrow reads local files by itself, without the interpreter.
    return pyarrow.parquet.ParquetFile(
        path if is_local(filesystem) else filesystem.open(path, "rb")
    )


def _describe(filesystem: Any, path: str) -> tuple[Any, list[RowGroup]]:
    """Columns and row groups of a file, from its metadata."""
    import pyarrow

    try:
        with _open(filesystem, path) as file:
            metadata = file.metadata
            groups = [
                RowGroup(path, index, metadata.row_group(index).num_rows)
                for index in range(metadata.num_row_groups)
            ]
            return file.schema_arrow, groups
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error


def _columns(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
