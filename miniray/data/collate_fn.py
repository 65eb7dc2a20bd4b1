"""What makes batches of tensors: by default, and as classes of the user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class NumpyBatchCollateFn:
    """Base of classes whose objects make a batch of a dictionary of NumPy arrays."""

    batch_format = "numpy"

    def __call__(self, batch: Any) -> Any:
        """Return the batch of some rows."""
        raise NotImplementedError


class ArrowBatchCollateFn(NumpyBatchCollateFn):
    """Base of those that make one of a table of Arrow."""

    batch_format = "pyarrow"


class PandasBatchCollateFn(NumpyBatchCollateFn):
    """Base of those that make one of a DataFrame of pandas."""

    batch_format = "pandas"


def batch_maker(
    dtypes: Any, device: Any, collate_fn: Callable[[Any], Any] | None, *, pin_memory: bool
) -> Callable[[Any], Any]:
    """Load PyTorch, and return the function that makes a batch.

    Args:
        dtypes: As of ``collate_torch``.
        device: Where tensors go: a device, "auto" or None.
        collate_fn: Makes the batch in place of ``collate_torch``.
        pin_memory: Whether they are put into pinned memory.
    """
    import torch
    from torch.utils.data._utils import pin_memory as pinned

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else None

    def batch_of(rows: Any) -> Any:
        batch = collate_torch(rows, dtypes) if collate_fn is None else collate_fn(rows)
        if pin_memory:
            batch = pinned.pin_memory(batch)
        if device is None or not isinstance(batch, dict):
            return batch
        return {
            name: value.to(device, non_blocking=True) if hasattr(value, "to") else value
            for name, value in batch.items()
        }

    return batch_of


def collate_torch(columns: Mapping[str, Any], dtypes: Any) -> dict[str, Any]:
    """Make tensors of arrays.

    Args:
        columns: The arrays, by name.
        dtypes: A dtype of PyTorch for all columns, one for each column by name, or None.
    """
    import torch

    tensors = {}
    for name, array in columns.items():
        if array.dtype == object and not any(value is not None for value in array):
            array = np.full(len(array), np.nan, np.float32)  # noqa: PLW2901 -- all are missing
        if array.dtype.kind in "OUSMm":
            raise TypeError(
                f"The column {name!r} has no numbers of one shape (dtype {array.dtype}). Drop "
                f"it, or pass iter_torch_batches(collate_fn=...), which gets columns as arrays."
            )
        # Arrays over shared memory are read-only, which tensors cannot be.
        writable = array.flags.writeable and array.flags.c_contiguous
        dtype = dtypes.get(name) if isinstance(dtypes, dict) else dtypes
        tensor = torch.from_numpy(array if writable else array.copy())
        tensors[name] = tensor if dtype is None else tensor.to(dtype)
    return tensors
