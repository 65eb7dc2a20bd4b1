"""Sources of rows that are in memory, or mapped into it: Arrow tables, Hugging Face datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.train.data.sources import Source

if TYPE_CHECKING:
    from collections.abc import Sequence

#: A table that keeps so many times its size alive, as a slice of a larger one does, is copied.
_SLICE_FACTOR = 1.5


class TableRows:
    """The rows of an Arrow table."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def take(self, rows: Any) -> Any:
        """These rows; those that follow each other are not copied."""
        if isinstance(rows, range):
            return self._table.slice(rows.start, len(rows))
        import pyarrow

        return self._table.take(pyarrow.array(rows))


class TableSource(Source):
    """An Arrow table.

    Args:
        table: A ``pyarrow.Table``.
    """

    def __init__(self, table: Any) -> None:
        self._table = _compact(table)

    @property
    def block_sizes(self) -> Sequence[int]:
        """One block of all rows: a table is read by number."""
        return [self._table.num_rows]

    def open_block(self, block: int) -> TableRows:
        """The table itself."""
        return TableRows(self._table)


class HuggingFaceSource(Source):
    """A ``datasets.Dataset`` whose values Arrow holds as they are: nothing has to be decoded."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.with_format("arrow")

    @property
    def block_sizes(self) -> Sequence[int]:
        """One block of all rows: the dataset maps its files and is read by number."""
        return [len(self._dataset)]

    def open_block(self, block: int) -> HuggingFaceSource:
        """The dataset itself."""
        return self

    def take(self, rows: Any) -> Any:
        """These rows as an Arrow table."""
        if isinstance(rows, range):
            return self._dataset[rows.start : rows.stop]
        return self._dataset[rows.tolist()]


def must_be_decoded(feature: Any) -> bool:
    """Whether values of a Hugging Face feature, such as an image, are not what Arrow holds."""
    if hasattr(feature, "decode_example"):
        return True
    if isinstance(feature, dict):
        return any(must_be_decoded(inner) for inner in feature.values())
    if isinstance(feature, list | tuple):
        return any(must_be_decoded(inner) for inner in feature)
    inner = getattr(feature, "feature", None)
    return inner is not None and must_be_decoded(inner)


def _compact(table: Any) -> Any:
    """The table in one chunk per column, and without what it is a slice of.

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
