"""What calls of generators return: refs as they come, or all of them at the end."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Generic, TypeVar

from miniray.common.object_ref import ObjectRef, hooks

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Iterator

    from miniray.objects.streams import StreamState

T = TypeVar("T")


class ObjectRefGenerator(Generic[T]):
    """Iterates, with ``for`` or ``async for``, over the refs of the yielded values.

    Each ref is ready when it comes. If the generator raises, the last ref gives
    that error to ``get``. Dropping the generator stops its task. It belongs to
    the process that made the call and cannot be passed to others.
    """

    def __init__(
        self, state: StreamState, wait: Callable[[Callable[[Callable[[], None]], bool]], None]
    ) -> None:
        self._state = state
        self._wait = wait

    def __iter__(self) -> ObjectRefGenerator[T]:
        return self

    def __next__(self) -> ObjectRef[T]:
        state = self._state
        while True:
            ref = state.take()
            if ref is not None:
                return ref
            if state.finished:
                raise StopIteration
            self._wait(state.when_changed)

    def __aiter__(self) -> ObjectRefGenerator[T]:
        return self

    async def __anext__(self) -> ObjectRef[T]:
        import asyncio

        state = self._state
        while True:
            ref = state.take()
            if ref is not None:
                return ref
            if state.finished:
                raise StopAsyncIteration
            loop = asyncio.get_running_loop()
            changed: asyncio.Future[None] = loop.create_future()

            def wake(
                loop: asyncio.AbstractEventLoop = loop, future: asyncio.Future[None] = changed
            ) -> None:
                loop.call_soon_threadsafe(_set, future)

            if not state.when_changed(wake):
                try:
                    await changed
                finally:
                    state.drop_waiter(wake)

    def completed(self) -> ObjectRef[bool]:
        """A ref that is ready when the task or method has ended.

        Its value is True. What is raised by the generator comes with its items; the ref raises
        what else has ended the call, such as the death of its process.
        """
        return self._state.completed_ref()

    def next_ready(self) -> bool:
        """Whether the next item is there, so that ``next`` returns at once. False at the end."""
        return self._state.has_item

    def is_finished(self) -> bool:
        """Whether the generator has ended and all items were taken: ``next`` raises then."""
        return self._state.finished

    def _next_ref(self) -> ObjectRef[bool]:
        """A ref that is ready when the next item, or the end, is there: for ``wait``."""
        return self._state.next_ref()

    def close(self) -> None:
        """Stop the task; values not taken are freed."""
        self._state.close()

    def __del__(self) -> None:
        if hooks.wake is not None:  # else there is no runtime: it ended, or this is a forked child
            self._state.close()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            "An ObjectRefGenerator belongs to the process that made the call and cannot be "
            "passed on. Pass the refs that it yields instead."
        )

    def __repr__(self) -> str:
        return f"ObjectRefGenerator({self._state.id.hex()})"


class DynamicObjectRefGenerator(Generic[T]):
    """The refs of all values that a call with ``num_returns="dynamic"`` has yielded.

    It is the value of the ref that such a call returns. It can be passed on and has a length. Each
    ref that iterating gives leaves it, so that its value may be freed. If the generator raised, the
    last ref gives that error to ``get``.
    """

    def __init__(self, refs: Iterable[ObjectRef[T]]) -> None:
        self._refs = collections.deque(refs)

    def __iter__(self) -> Iterator[ObjectRef[T]]:
        while self._refs:
            yield self._refs.popleft()

    def __len__(self) -> int:
        return len(self._refs)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
