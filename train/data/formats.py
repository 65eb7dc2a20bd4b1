"""Rows in the form in which a train loop wants them: NumPy, pandas, Arrow, PyTorch tensors."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def formatter(batch_format: str | None, *, tabular: bool) -> Callable[[Any], Any]:
    """Return what turns rows of a source into a batch.

    Args:
        batch_format: ``"default"``, ``"numpy"``, ``"pandas"``, ``"pyarrow"``; None is the last.
        tabular: Whether rows are tables of Arrow; otherwise they are lists of items.

    Raises:
        ValueError: There is no such format, or not for these rows.
    """
    if tabular:
        from miniray.data.blocks import check_format, table_to_batch

        check_format("iter_batches", batch_format)
        return functools.partial(table_to_batch, batch_format=batch_format)
    if batch_format not in ("default", "numpy"):
        raise ValueError(
            f"iter_batches(batch_format={batch_format!r}) is for tables. This dataset gives items, "
            f"which come as batch_format='numpy'."
        )
    return collate_numpy


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
