"""What makes batches of tensors: by default, and as classes of the user."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

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


@dataclasses.dataclass(frozen=True)
class TorchSpec:
    """How batches of tensors are made.

    Attributes:
        dtypes: One for all columns, one for each by name, or None.
        device: Where they go: a device, "auto" or None.
        collate_fn: Makes the batch of arrays in place of what is here.
        pin_memory: Whether they are put into pinned memory.
    """

    dtypes: Any = None
    device: Any = "auto"
    collate_fn: Callable[[Any], Any] | None = None
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if self.dtypes is not None and self.collate_fn is not None:
            raise ValueError(
                "iter_torch_batches() takes dtypes or collate_fn, not both; convert in collate_fn."
            )

    @property
    def batch_format(self) -> str:
        """What ``maker`` takes."""
        return getattr(self.collate_fn, "batch_format", "numpy")

    def maker(self) -> Callable[[Any], Any]:
        """Load PyTorch, and return what makes a batch of rows."""
        import torch
        from torch.utils.data._utils.pin_memory import pin_memory

        collate = self.collate_fn or collate_torch(self.dtypes)
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.collate_fn is None and device == "cpu":
            device = None  # where they are made

        def batch_of(columns: Any) -> Any:
            batch = collate(columns)
            if self.pin_memory:
                batch = pin_memory(batch)
            if device is None or not isinstance(batch, dict):
                return batch
            return {
                name: value.to(device, non_blocking=True) if hasattr(value, "to") else value
                for name, value in batch.items()
            }

        return batch_of


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
    tensor = torch.from_numpy(writable)
    return tensor if dtype is None else tensor.to(dtype)
