"""Rows in the form in which a train loop wants them: NumPy, pandas, Arrow, PyTorch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
    return _to_pandas if name == "pandas" else _as_it_is


def _as_it_is(table: Any) -> Any:
    return table


def _to_pandas(table: Any) -> Any:
    return table.to_pandas()


def table_to_numpy(table: Any) -> dict[str, Any]:
    """Columns of a table as arrays.

    Lists become further axes where all are of one length, tensors keep their shape, null
    becomes NaN in columns of numbers, and text is of dtype object.
    """
    return {name: _column(table.column(name)) for name in table.column_names}


def _column(column: Any) -> Any:
    import pyarrow

    array = column.combine_chunks()
    if isinstance(array, pyarrow.ChunkedArray):  # what exceeds 2 GiB stays in chunks
        parts = [_array(chunk) for chunk in array.chunks]
        return np.concatenate(parts) if parts else _array(pyarrow.array([], array.type))
    return _array(array)


def _array(array: Any) -> Any:
    import pyarrow

    kind = array.type
    if isinstance(kind, pyarrow.FixedShapeTensorType) and not array.null_count:
        return array.to_numpy_ndarray()
    if isinstance(kind, pyarrow.ExtensionType):
        return _array(array.storage)
    if pyarrow.types.is_fixed_size_list(kind) and not array.null_count:
        inner = _array(array.flatten())
        return inner.reshape(len(array), kind.list_size, *inner.shape[1:])
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return _lists(array)
    return array.to_numpy(zero_copy_only=False)


def _lists(array: Any) -> Any:
    """Lists as one array if all have one length, otherwise as an array of arrays."""
    lengths = set(array.value_lengths().to_pylist())
    if len(lengths) == 1 and None not in lengths:
        inner = _array(array.flatten())
        return inner.reshape(len(array), lengths.pop(), *inner.shape[1:])
    return array.to_numpy(zero_copy_only=False)


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


def collate_torch(dtypes: Any) -> Callable[[Any], Any]:
    """Return what makes tensors of a dictionary of arrays.

    Args:
        dtypes: A dtype of PyTorch for all columns, one for each column by name, or None.
    """

    def collate(columns: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: _tensor(name, array, dtypes.get(name) if isinstance(dtypes, dict) else dtypes)
            for name, array in columns.items()
        }

    return collate


def _tensor(name: str, array: Any, dtype: Any) -> Any:
    import torch

    if array.dtype.kind == "O" or array.dtype.kind in "USMm":
        raise TypeError(
            f"The column {name!r} has no numbers of one shape (dtype {array.dtype}), so it can't "
            f"be a tensor. Leave it out of the data, or pass iter_torch_batches(collate_fn=...), "
            f"which gets the columns as arrays."
        )
    # Arrays over shared memory are read-only, which tensors cannot be.
    writable = array if array.flags.writeable and array.flags.c_contiguous else array.copy()
    return torch.as_tensor(writable, dtype=dtype)
