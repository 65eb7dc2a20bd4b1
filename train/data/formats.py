"""Rows in the form in which a train loop wants them: NumPy, pandas, Arrow, PyTorch tensors."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BATCH_FORMATS = ("default", "numpy", "pandas", "pyarrow")


def formatter(batch_format: str | None, *, tabular: bool) -> Callable[[Any], Any]:
    """Return what turns rows of a source into a batch.

    Args:
        batch_format: One of ``BATCH_FORMATS``; None is ``"pyarrow"``.
        tabular: Whether rows are tables of Arrow; otherwise they are lists of items.

    Raises:
        ValueError: There is no such format, or not for these rows.
    """
    name = "pyarrow" if batch_format is None else batch_format
    if name not in BATCH_FORMATS:
        raise ValueError(
            f"iter_batches(batch_format={batch_format!r}) is not known. "
            f"Use one of {', '.join(BATCH_FORMATS)}."
        )
    if name in ("default", "numpy"):
        return table_to_numpy if tabular else collate_numpy
    if not tabular:
        raise ValueError(
            f"iter_batches(batch_format={batch_format!r}) is for tables. This dataset gives items, "
            f"which come as batch_format='numpy'."
        )
    return operator.methodcaller("to_pandas") if name == "pandas" else lambda table: table


def table_to_numpy(table: Any) -> dict[str, Any]:
    """Columns of a table as arrays; see ``miniray.data.blocks.to_numpy``."""
    from miniray.data.blocks import table_to_batch

    batch: dict[str, Any] = table_to_batch(table.combine_chunks(), "numpy")
    return batch


def collate_numpy(items: Sequence[Any]) -> Any:
    """Items as arrays, in the structure of one item: a dictionary, a tuple, or a value."""
    first = items[0]
    if isinstance(first, dict):
        return {key: collate_numpy([item[key] for item in items]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(collate_numpy(column) for column in zip(*items, strict=True))
    arrays = [np.asarray(item) for item in items]
    if arrays[0].dtype.kind in "US":
        return np.array(items, dtype=object)
    if len({array.shape for array in arrays}) > 1:
        ragged: Any = np.empty(len(arrays), dtype=object)
        ragged[:] = arrays
        return ragged
    return np.stack(arrays)
