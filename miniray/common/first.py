"""The first of many things in some order, in bounded memory."""

from __future__ import annotations

import operator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

#: Things that are taken in before those that are not among the first are dropped.
_ROOM = 1000


class First(Generic[T]):
    """Keeps the ``limit`` things whose keys come first, each with its key.

    Args:
        limit: How many.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: list[tuple[Any, T]] = []
        #: What comes at or behind this key is not wanted any more.
        self._last: Any = None

    def add(self, key: Any, item: T) -> None:
        """One more."""
        if self._last is not None and key >= self._last:
            return
        self._kept.append((key, item))
        if len(self._kept) >= 2 * self._limit + _ROOM:
            self._trim()

    def items(self) -> list[T]:
        """Those that are kept, in order."""
        self._trim()
        return [item for _, item in self._kept]

    def _trim(self) -> None:
        self._kept.sort(key=operator.itemgetter(0))
        del self._kept[self._limit :]
        if len(self._kept) == self._limit:
            self._last = self._kept[-1][0]
