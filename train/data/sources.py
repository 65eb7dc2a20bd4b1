"""What datasets are read as: sources of a known number of rows, or streams of items."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from miniray.train.data.reading import ItemReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


class StreamSource(abc.ABC):
    """Data that can only be read from the beginning, of unknown length."""

    modules: Sequence[str] = ()

    @abc.abstractmethod
    def items(self, epoch: int) -> Iterator[Any]:
        """Return the items of an epoch."""


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
        return ItemReader(self.items, len(self._dataset), seed)

    def items(self, numbers: list[int]) -> list[Any]:
        """Return the items of these numbers."""
        # As PyTorch's own loader does: datasets may read several items at once.
        several = getattr(self._dataset, "__getitems__", None)
        if several is not None:
            return list(several(numbers))
        return [self._dataset[number] for number in numbers]


class IterableSource(StreamSource):
    """A dataset with ``__iter__`` alone.

    Each rank iterates over all of it and keeps its own items, so that every rank knows where the
    data end. A dataset with ``set_epoch`` is told the epoch.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def items(self, epoch: int) -> Iterator[Any]:
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return iter(self._dataset)
