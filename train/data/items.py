"""Sources of items: PyTorch's map-style and iterable datasets, and what looks like them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.train.data.sources import Source, StreamSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class ItemRows:
    """The items of a dataset, by number."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        # As PyTorch's own loader does: datasets may read several items at once.
        self._several = getattr(dataset, "__getitems__", None)

    def take(self, rows: Any) -> list[Any]:
        """Read these items."""
        numbers = [int(row) for row in rows]
        if self._several is not None:
            return list(self._several(numbers))
        return [self._dataset[number] for number in numbers]


class MapSource(Source):
    """A dataset with ``__len__`` and ``__getitem__``."""

    tabular = False

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._size = len(dataset)

    @property
    def block_sizes(self) -> Sequence[int]:
        """One block of all items; they are read one by one anyway."""
        return [self._size]

    def open_block(self, block: int) -> ItemRows:
        """The dataset itself."""
        return ItemRows(self._dataset)


class IterableSource(StreamSource):
    """A dataset with ``__iter__`` alone.

    Each rank iterates over all of it and keeps its own items, so that every rank knows where the
    data end. A dataset with ``set_epoch`` is told the epoch.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def items(self, epoch: int) -> Iterator[Any]:
        """Begin anew."""
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return iter(self._dataset)
