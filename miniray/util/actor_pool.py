"""``ActorPool``: hands values to whichever of a fixed set of actors is free.

It keeps track of which actor works on what; it starts and ends no actors.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any, Generic

from miniray import api
from miniray.exceptions import ActorDiedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from typing_extensions import TypeVar

    # With a default, so that ``pool = ActorPool(actors)`` needs no annotation, as in Ray.
    V = TypeVar("V", default=Any)
else:
    from typing import TypeVar

    V = TypeVar("V")


class ActorPool(Generic[V]):
    """A pool of actors that share out calls, one call at a time per actor.

    Results are taken either in the order of submission (``get_next``, ``map``) or
    as they finish (``get_next_unordered``, ``map_unordered``). Not thread-safe.

    Args:
        actors: Handles of running actors.
    """

    def __init__(self, actors: Iterable[Any]) -> None:
        self._idle: list[Any] = list(actors)
        #: By number: the ref of each call whose result was not taken yet, and its actor.
        self._running: dict[int, tuple[Any, Any]] = {}
        self._waiting: collections.deque[tuple[Callable[[Any, V], Any], V]] = collections.deque()
        self._submitted = 0
        self._next_number = 0

    def map(self, fn: Callable[[Any, V], Any], values: Iterable[V]) -> Iterator[Any]:
        """Apply a call to every value; results come in the order of the values.

        Results of earlier calls that were not taken are dropped first.

        Args:
            fn: Takes (actor, value) and returns the ref of a call to that actor.
            values: What to hand out; read at once.

        Returns:
            An iterator over the results, which raises the error of a failed call.
        """
        self._drop_untaken()
        for value in values:
            self.submit(fn, value)
        return self._results(self.get_next)

    def map_unordered(self, fn: Callable[[Any, V], Any], values: Iterable[V]) -> Iterator[Any]:
        """Do as ``map``, but yield results as they finish."""
        self._drop_untaken()
        for value in values:
            self.submit(fn, value)
        return self._results(self.get_next_unordered)

    def submit(self, fn: Callable[[Any, V], Any], value: V) -> None:
        """Hand one value to a free actor, or queue it until an actor is free.

        Args:
            fn: Takes (actor, value) and returns the ref of a call to that actor.
            value: The value.
        """
        if not self._idle:
            self._waiting.append((fn, value))
            return
        actor = self._idle.pop()
        self._running[self._submitted] = fn(actor, value), actor
        self._submitted += 1

    def has_next(self) -> bool:
        """Return whether there are results that have not been taken."""
        return bool(self._running)

    def get_next(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """Return the next result, in the order of submission.

        Args:
            timeout: Seconds to wait; None waits for ever.
            ignore_if_timedout: Give up the call that took too long and go on with the
                one after it next time.

        Raises:
            StopIteration: no result is left.
            ValueError: results were already taken out of order.
            TimeoutError: the result did not come in time.
        """
        if not self.has_next():
            raise StopIteration("No more results to get")
        if self._next_number not in self._running:
            raise ValueError("get_next() is not allowed after get_next_unordered()")
        ref, _ = self._running[self._next_number]
        refs = ref if isinstance(ref, list) else [ref]
        timed_out = False
        if timeout is not None:
            ready, _ = api.wait(refs, num_returns=len(refs), timeout=timeout)
            timed_out = len(ready) < len(refs)
            if timed_out and not ignore_if_timedout:
                raise TimeoutError("Timed out waiting for result")
        return self._take(self._next_number, timed_out)

    def get_next_unordered(
        self, timeout: float | None = None, ignore_if_timedout: bool = False
    ) -> Any:
        """Return the next result, whichever finishes first.

        Args:
            timeout: Seconds to wait; None waits for ever.
            ignore_if_timedout: Give up one of the calls that took too long.

        Raises:
            StopIteration: no result is left.
            TimeoutError: no result came in time.
        """
        if not self.has_next():
            raise StopIteration("No more results to get")
        # Of a call with several returns, the first one shows that it has finished.
        numbers = {
            ref[0] if isinstance(ref, list) else ref: number
            for number, (ref, _) in self._running.items()
        }
        ready, pending = api.wait(list(numbers), num_returns=1, timeout=timeout)
        if not ready and not ignore_if_timedout:
            raise TimeoutError("Timed out waiting for result")
        return self._take(numbers[(ready or pending)[0]], timed_out=not ready)

    def has_free(self) -> bool:
        """Return whether an actor is idle and no call waits for one."""
        return bool(self._idle) and not self._waiting

    def pop_idle(self) -> Any | None:
        """Take an idle actor out of the pool; None if there is none."""
        return self._idle.pop() if self.has_free() else None

    def push(self, actor: Any) -> None:
        """Add an actor to the pool.

        Raises:
            ValueError: the actor is in the pool already.
        """
        busy = [running for _, running in self._running.values()]
        if actor in self._idle or actor in busy:
            raise ValueError("Actor already belongs to current ActorPool")
        self._release(actor)

    def _results(self, take: Callable[[], Any]) -> Iterator[Any]:
        while self.has_next():
            yield take()

    def _drop_untaken(self) -> None:
        while self.has_next():
            # The outcome of an abandoned call does not matter any more, an error included.
            self._forget(next(iter(self._running)), is_alive=True)
        self._next_number = self._submitted

    def _take(self, number: int, timed_out: bool) -> Any:
        ref, _ = self._running[number]
        if timed_out:
            self._forget(number, is_alive=True)
            raise TimeoutError(f"Timed out waiting for result. The call {ref} has been ignored.")
        is_alive = True
        try:
            return api.get(ref)
        except ActorDiedError:
            is_alive = False
            raise
        finally:
            self._forget(number, is_alive)

    def _forget(self, number: int, is_alive: bool) -> None:
        _, actor = self._running.pop(number)
        self._next_number = max(self._next_number, number + 1)
        if is_alive:
            self._release(actor)

    def _release(self, actor: Any) -> None:
        self._idle.append(actor)
        if self._waiting:
            self.submit(*self._waiting.popleft())
