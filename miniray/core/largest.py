"""The largest of many things, in bounded memory."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")


class Largest(Generic[T]):
    """Keeps the ``limit`` largest of what is added; of equal ones those that came first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._number = 0
        self._heap: list[tuple[int, int, T]] = []

    def add(self, size: int, item: T) -> None:
        """One more."""
        self._number -= 1  # unique, so that items are never compared
        if len(self._heap) < self._limit:
            heapq.heappush(self._heap, (size, self._number, item))
        elif self._heap and size > self._heap[0][0]:
            heapq.heapreplace(self._heap, (size, self._number, item))

    def items(self) -> list[T]:
        """Those that are kept, the largest first."""
        return [item for _, _, item in sorted(self._heap, key=lambda kept: kept[:2], reverse=True)]
