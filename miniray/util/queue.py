"""``Queue``: a first-in-first-out queue that tasks, actors and drivers share.

The items live in an asyncio actor; this class is a picklable handle to it.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from miniray import api
from miniray.decorator import remote

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping


class Empty(queue.Empty):
    """There is no item to take."""


class Full(queue.Full):
    """The queue has ``maxsize`` items already."""


class Queue:
    """A queue with the interface of ``queue.Queue``, usable from anywhere in the cluster.

    Handles may be passed to tasks and actors; all of them reach the same items.

    Args:
        maxsize: How many items fit; 0 means no limit.
        actor_options: Options of the actor that holds the items, for example
            ``{"num_cpus": 1, "name": "jobs"}``.
    """

    def __init__(self, maxsize: int = 0, actor_options: Mapping[str, Any] | None = None) -> None:
        self.maxsize = maxsize
        actor_class: Any = remote(_QueueActor)
        self.actor: Any = actor_class.options(**(actor_options or {})).remote(maxsize)

    def __len__(self) -> int:
        return self.qsize()

    def qsize(self) -> int:
        """Return how many items wait."""
        size: int = api.get(self.actor.qsize.remote())
        return size

    def size(self) -> int:
        """Return how many items wait."""
        return self.qsize()

    def empty(self) -> bool:
        """Return whether no item waits."""
        return self.qsize() == 0

    def full(self) -> bool:
        """Return whether no item fits."""
        return 0 < self.maxsize <= self.qsize()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add an item.

        Args:
            item: Any value that can be pickled.
            block: Wait until the queue has fewer than ``maxsize`` items.
            timeout: Seconds to wait at most; None waits for ever.

        Raises:
            Full: the queue had ``maxsize`` items (in time).
            ValueError: ``timeout`` is negative.
        """
        api.get(self._put(item, block, timeout))

    async def put_async(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Do as ``put`` for asyncio code."""
        await self._put(item, block, timeout)

    def put_nowait(self, item: Any) -> None:
        """Do as ``put(item, block=False)``."""
        self.put(item, block=False)

    def put_nowait_batch(self, items: Iterable[Any]) -> None:
        """Add several items in order, all of them or none.

        Raises:
            Full: not all of them fit.
            TypeError: ``items`` is not iterable.
        """
        if not isinstance(items, Iterable):
            raise TypeError(f"'items' must be an iterable, not {type(items).__name__}")
        api.get(self.actor.put_nowait_batch.remote(list(items)))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the oldest item.

        Args:
            block: Wait until there is one.
            timeout: Seconds to wait at most; None waits for ever.

        Raises:
            Empty: there was no item (in time).
            ValueError: ``timeout`` is negative.
        """
        return api.get(self._get(block, timeout))

    async def get_async(self, block: bool = True, timeout: float | None = None) -> Any:
        """Do as ``get`` for asyncio code."""
        return await self._get(block, timeout)

    def get_nowait(self) -> Any:
        """Do as ``get(block=False)``."""
        return self.get(block=False)

    def get_nowait_batch(self, num_items: int) -> list[Any]:
        """Take several items in order.

        Args:
            num_items: How many.

        Raises:
            Empty: fewer items wait; none is taken then.
            TypeError: ``num_items`` is not an integer.
            ValueError: ``num_items`` is negative.
        """
        if not isinstance(num_items, int):
            raise TypeError(f"'num_items' must be an int, not {type(num_items).__name__}")
        if num_items < 0:
            raise ValueError(f"'num_items' must not be negative, but is {num_items}")
        items: list[Any] = api.get(self.actor.get_nowait_batch.remote(num_items))
        return items

    def shutdown(self, force: bool = False, grace_period_s: float = 5) -> None:
        """End the actor that holds the items; every handle is useless afterwards.

        Args:
            force: End it at once, calls in progress included.
            grace_period_s: Seconds that calls in progress have otherwise.
        """
        if self.actor is None:
            return
        ended = False
        if not force:
            done = self.actor.__ray_terminate__.remote()
            ended = bool(api.wait([done], timeout=grace_period_s)[0])
        if not ended:
            api.kill(self.actor, no_restart=True)
        self.actor = None

    def _put(self, item: Any, block: bool, timeout: float | None) -> Any:
        if not block:
            return self.actor.put_nowait.remote(item)
        return self.actor.put.remote(item, checked(timeout))

    def _get(self, block: bool, timeout: float | None) -> Any:
        if not block:
            return self.actor.get_nowait.remote()
        return self.actor.get.remote(checked(timeout))


def checked(timeout: float | None) -> float | None:
    """Return the timeout, if it is one; raises ValueError otherwise."""
    if timeout is not None and timeout < 0:
        raise ValueError(f"'timeout' must be a non-negative number, but is {timeout}")
    return timeout


class _QueueActor:
    """Holds the items. Every method runs in the actor's event loop."""

    def __init__(self, maxsize: int) -> None:
        import asyncio

        self.maxsize = maxsize
        self.queue: asyncio.Queue[Any] = asyncio.Queue(maxsize)

    async def qsize(self) -> int:
        return self.queue.qsize()

    async def put(self, item: Any, timeout: float | None) -> None:
        import asyncio

        try:
            await asyncio.wait_for(self.queue.put(item), timeout)
        except asyncio.TimeoutError:
            raise Full(f"the queue held its {self.maxsize} items for {timeout} s") from None

    async def get(self, timeout: float | None) -> Any:
        import asyncio

        try:
            return await asyncio.wait_for(self.queue.get(), timeout)
        except asyncio.TimeoutError:
            raise Empty(f"the queue stayed empty for {timeout} s") from None

    async def put_nowait(self, item: Any) -> None:
        await self.put_nowait_batch([item])

    async def put_nowait_batch(self, items: list[Any]) -> None:
        if 0 < self.maxsize < self.queue.qsize() + len(items):
            raise Full(
                f"the queue has {self.queue.qsize()} of at most {self.maxsize} items: "
                f"{len(items)} more do not fit"
            )
        for item in items:
            self.queue.put_nowait(item)

    async def get_nowait(self) -> Any:
        return (await self.get_nowait_batch(1))[0]

    async def get_nowait_batch(self, num_items: int) -> list[Any]:
        if num_items > self.queue.qsize():
            raise Empty(f"the queue has {self.queue.qsize()} items, not {num_items}")
        return [self.queue.get_nowait() for _ in range(num_items)]
