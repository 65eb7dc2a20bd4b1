"""Sources that read files row group by row group; metadata tell how many rows there are."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.dataset

from miniray.data.blocks import from_file
from miniray.data.files import find_files
from miniray.train.data.sources import Source, TableRows

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

#: Files whose metadata are read at once.
_READERS = 16


class FragmentSource(Source):
    """The files of a ``pyarrow.dataset.Dataset``, with its columns and partitions.

    Parquet is read row group by row group: a rank holds one in memory, and what is read ahead.
    Other files are read whole, one at a time.

    Raises:
        ValueError: The dataset is filtered or projected, so that metadata do not tell its rows.
    """

    def __init__(self, dataset: Any) -> None:
        self._schema = dataset.schema
        with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
            found = list(pool.map(_blocks, dataset.get_fragments()))
        self._blocks = [(fragment, rows) for each in found for fragment, rows in each if rows]

    @property
    def block_sizes(self) -> Sequence[int]:
        return [rows for _, rows in self._blocks]

    def open_block(self, block: int) -> TableRows:
        fragment, _ = self._blocks[block]
        # One column after another by one thread: training has the others.
        table = fragment.to_table(schema=self._schema, use_threads=False)
        return TableRows(from_file(table).combine_chunks())


def _blocks(fragment: Any) -> list[tuple[Any, int]]:
    if hasattr(fragment, "row_groups"):
        return [
            (fragment.subset(row_group_ids=[group.id]), group.num_rows)
            for group in fragment.row_groups
        ]
    return [(fragment, fragment.count_rows())]


def parquet_source(paths: Sequence[str | os.PathLike[str]]) -> FragmentSource:
    """Return the source of local paths or URLs of Parquet files, folders or glob patterns.

    Raises:
        FileNotFoundError: There is no file at one of the paths.
        ValueError: The files have different columns, or one is no Parquet file.
    """
    filesystem, found = find_files(paths, None, [".parquet"], "Parquet")
    files = [path for path, _ in found]
    try:
        dataset = pyarrow.dataset.dataset(files, filesystem=filesystem, format="parquet")
        source = FragmentSource(dataset)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"Not each of them is a Parquet file: {error}") from error
    for fragment in dataset.get_fragments():
        if not fragment.physical_schema.equals(dataset.schema):
            raise ValueError(
                f"The Parquet files have different columns: {files[0]} has "
                f"{_columns(dataset.schema)}, and {fragment.path} has "
                f"{_columns(fragment.physical_schema)}."
            )
    return source


def _columns(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
