"""What datasets are read as: sources of a known number of rows, or streams of items.

And the batches of NumPy, pandas or Arrow that are made of their rows.
"""

from __future__ import annotations

import abc
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from miniray.train.data.position import ENDLESS
from miniray.train.data.reading import ItemReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from miniray.train.data.position import Range
    from miniray.train.data.reading import Reader


class Source(abc.ABC):
    """Data with a known number of rows."""

    #: Whether pieces are tables of Arrow; otherwise they are lists of items.
    tabular: bool = True
    #: Modules that reading it needs, and that take long to load.
    modules: Sequence[str] = ()

    @property
    @abc.abstractmethod
    def block_sizes(self) -> Sequence[int]:
        """Rows of each block: what is read at once."""

    @abc.abstractmethod
    def passes(self, seed: int | None, whole: Sequence[Range], share: int) -> Reader:
        """Return what reads passes over a rank's part.

        Args:
            seed: From which the orders of epochs are drawn; None keeps the data's own.
            whole: The rank's part of a whole epoch.
            share: How many ranks there are.
        """

    @property
    def num_rows(self) -> int:
        return sum(self.block_sizes)


class MapSource(Source):
    """A dataset with ``__len__`` and ``__getitem__``; its items are read one by one."""

    tabular = False

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    @property
    def block_sizes(self) -> Sequence[int]:
        return [len(self._dataset)]

    def passes(self, seed: int | None, whole: Sequence[Range], share: int) -> Reader:
        del whole, share
        return ItemReader(self._dataset, seed)


class StreamSource:
    """A dataset with ``__iter__`` alone, read from its beginning, of unknown length.

    Each rank iterates over all of it and keeps its own items, so that every rank knows where the
    data end. A dataset with ``set_epoch`` is told the epoch.
    """

    tabular = False
    modules: Sequence[str] = ()
    num_rows = ENDLESS

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def items(self, epoch: int) -> Iterator[Any]:
        """Return the items of an epoch."""
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return iter(self._dataset)


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
    """Return items as arrays, in the structure of one item: a dictionary, a tuple, or a value."""
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
