"""Items of an iterator that a thread makes before they are requested."""

from __future__ import annotations

import collections
import concurrent.futures
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")


def read_ahead(items: Iterator[T], depth: int, thread_name: str) -> Iterator[T]:
    """Return the items; a thread makes up to ``depth`` of them ahead, from now on.

    A reader that stops early waits for the item that is being made: after that ``items`` is not
    read any more. 0 makes each on request, without a thread.
    """
    if depth == 0:
        return items
    end: Any = object()
    thread = concurrent.futures.ThreadPoolExecutor(1, thread_name)
    ahead = collections.deque(thread.submit(next, items, end) for _ in range(depth))
    return _taken(items, ahead, thread, end)


def _taken(
    items: Iterator[T],
    ahead: collections.deque[concurrent.futures.Future[T]],
    thread: concurrent.futures.ThreadPoolExecutor,
    end: Any,
) -> Iterator[T]:
    try:
        while (item := ahead.popleft().result()) is not end:
            ahead.append(thread.submit(next, items, end))
            yield item
            del item  # not kept while the next one is waited for
    finally:
        thread.shutdown(cancel_futures=True)
