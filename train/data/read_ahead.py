"""Runs an iterator in a thread, a few items ahead of its reader."""

from __future__ import annotations

import collections
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")


def read_ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield the items, of which up to ``depth`` are made before they are asked for.

    A reader that stops early waits for the item that is being made: after that nothing reads from
    ``items`` any more. 0 makes each when it is asked for, without a thread.
    """
    if depth == 0:
        yield from items
        return
    buffer: _Buffer[T] = _Buffer(depth)
    thread = threading.Thread(target=buffer.fill, args=(items,), name="train-data", daemon=True)
    thread.start()
    try:
        yield from buffer.drain()
    finally:
        buffer.close()
        thread.join()


class _Buffer(Generic[T]):
    """Items between two threads, at most ``depth``."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: collections.deque[T] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False  # the reader has stopped
        self._ended = False  # nothing comes any more
        self._error: BaseException | None = None

    def fill(self, items: Iterator[T]) -> None:
        """Run the iterator to its end, or until its reader has stopped."""
        error: BaseException | None = None
        try:
            for item in items:
                if not self._put(item):
                    break
        except BaseException as caught:  # noqa: BLE001 - raised where the items are read
            error = caught
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def drain(self) -> Iterator[T]:
        """Yield the items until there are no more.

        Raises:
            BaseException: What the iterator raised, after the items before it.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._ended)
                if not self._items:
                    break
                item = self._items.popleft()
                self._changed.notify_all()
            yield item
            del item  # not kept while the next one is waited for
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Take nothing more."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def _put(self, item: T) -> bool:
        """Add an item as soon as there is capacity; False if the reader has stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True
