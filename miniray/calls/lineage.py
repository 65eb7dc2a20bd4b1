"""Origins of the results of tasks, so that a lost one can be made again.

Kept by the owner for results in shared memory while they, or what was made from them,
are in use. An argument that is a result of such a task is made again first. One that no task can
make again is kept alive (as in Ray), if the results are on other nodes: results on this node
are lost together with this process. Bookkeeping only: it runs no task.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from typing import TYPE_CHECKING, Any

from miniray.calls.call import Origin
from miniray.messages.value import is_shared, refs_in, size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.calls.call import Call, RefArgument
    from miniray.common.object_ref import ObjectRef
    from miniray.messages.value import Value


@dataclasses.dataclass(eq=False, repr=False)
class Lineage:
    """The origins of this process's results, bounded in number and size. Thread-safe."""

    #: Origins that are kept at most.
    _max_calls: int
    #: Bytes of arguments that they keep in this process.
    _max_bytes: int

    def __post_init__(self) -> None:
        self._bytes = 0
        #: Arguments in shared memory that are no longer needed: the caller frees them.
        self.unneeded: collections.deque[Value] = collections.deque()
        self._numbers = itertools.count(1).__next__
        self._by_result: dict[bytes, Origin] = {}
        #: In order of arrival: the oldest are given up first.
        self._origins: collections.OrderedDict[int, Origin] = collections.OrderedDict()
        # Reentrant: a garbage collection may run user code, which may drop refs, anywhere.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._origins)

    def pinning(self) -> list[Origin]:
        """Return the origins that keep values alive."""
        with self._lock:
            origins = list(self._origins.values())
        return [each for each in origins if each.pins or each.has_large_arguments]

    def keep(
        self,
        call: Call,
        refs: list[RefArgument],
        results: int,
        pins: Sequence[ObjectRef[Any]] | None,
    ) -> bool:
        """Remember the task of a call that ended well; False if it cannot be repeated.

        Args:
            call: The call; call ``ended`` for its origin when it has.
            refs: Its top-level refs, with the values that they have now.
            results: How many of its results are in use; call ``forget`` for each.
            pins: Refs to keep alive that no task can make again; None: neither these nor large
                arguments.
        """
        origin = call.origin or self._origin(call, refs, call.return_ids, pins)
        if origin is None:
            return False
        with self._lock:
            if any(id in self._by_result for id in origin.return_ids):
                return True  # it ran again: what is known of it stays good
            call.origin = origin
            origin.users = results
            for id in origin.return_ids:
                self._by_result[id] = origin
            self._enter(origin)
        return True

    def stream(
        self,
        call: Call,
        refs: list[RefArgument],
        items: Sequence[bytes],
        pins: Sequence[ObjectRef[Any]] | None,
    ) -> Origin | None:
        """Return what the items of a generator are made again from; None if they cannot be.

        Args:
            call: Its call; call ``ended`` for its origin when it has.
            refs: as of ``keep``.
            items: ids of the items so far, which grows.
            pins: as of ``keep``.
        """
        call.origin = self._origin(call, refs, items, pins)
        return call.origin

    def keep_item(self, origin: Origin, id: bytes) -> None:
        """Remember a generator for one more of its items; call ``forget`` for that."""
        with self._lock:
            self._by_result[id] = origin
            origin.users += 1
            if origin.number not in self._origins:
                self._enter(origin)

    def _origin(
        self,
        call: Call,
        refs: list[RefArgument],
        return_ids: Sequence[bytes],
        pins: Sequence[ObjectRef[Any]] | None,
    ) -> Origin | None:
        large = is_shared(call.arguments)
        if call.retries == 0 or (large and pins is None):
            return None
        kept: list[RefArgument] = []
        needs = list(refs_in(call.arguments))
        size = 0 if large else size_of(call.arguments)
        for where, id, node, value in refs:
            if value is not None and not is_shared(value):
                kept.append((where, id, node, value))
                needs.extend(refs_in(value))
                size += size_of(value)
            else:
                kept.append((where, id, node, None))
                needs.append((id, node))
        return Origin(
            self._numbers(),
            call.channel,
            call.target,
            call.name,
            return_ids,
            call.arguments,
            kept,
            tuple((id, node) for id, node in needs if node),
            call.options,
            call.retries,
            call.retry_exceptions,
            list(pins or ()),
            pins is not None,
            call.stream is not None,
            size=size,
        )

    def _enter(self, origin: Origin) -> None:
        origin.uses += 1
        for id, _ in origin.needs:
            source = self._by_result.get(id)
            if source is not None:
                source.users += 1
        self._origins[origin.number] = origin
        self._bytes += origin.size
        # Arguments that a task can make again need not be kept.
        origin.keeps = origin.keeps or all(self._can_be_made(id) for id, _ in origin.needs)
        origin.pins = [ref for ref in origin.pins if not self._can_be_made(ref.binary())]
        while len(self._origins) > self._max_calls or self._bytes > self._max_bytes:
            self._remove([next(iter(self._origins.values()))])

    def _can_be_made(self, id: bytes) -> bool:
        """Return whether a task can make an object again, whatever has been dropped by then."""
        origin = self._by_result.get(id)
        return origin is not None and origin.keeps

    def run(self, origins: list[Origin]) -> bool:
        """Hold what origins need for one more run of each, until ``ended`` is called.

        Returns:
            False if one was given up meanwhile; then all stay as they were.
        """
        with self._lock:
            if not all(origin.uses for origin in origins):
                return False
            for origin in origins:
                origin.uses += 1
            return True

    def ended(self, origin: Origin) -> None:
        with self._lock:
            self._used(origin)

    def _used(self, origin: Origin) -> None:
        origin.uses -= 1
        if not origin.uses:
            origin.pins = []
            if origin.has_large_arguments:
                self.unneeded.append(origin.arguments)

    def find(self, id: bytes) -> Origin | None:
        return self._by_result.get(id)

    def spend(self, origin: Origin) -> bool:
        """Count one more run; False if it may not run again."""
        with self._lock:
            if origin.retries == 0:
                return False
            if origin.retries > 0:
                origin.retries -= 1
            return True

    def use(self, id: bytes) -> None:
        """Count a result that is to be made again."""
        with self._lock:
            origin = self._by_result.get(id)
            if origin is not None:
                origin.users += 1

    def forget(self, id: bytes) -> None:
        """Drop the origin of a result that is out of use, if no other result needs it."""
        with self._lock:
            origin = self._by_result.get(id)
            if origin is not None:
                origin.users -= 1
                if origin.users <= 0:
                    self._remove([origin])

    def _remove(self, gone: list[Origin]) -> None:
        """Drop origins, and the origins that only they needed: a loop, for chains can be long."""
        while gone:
            origin = gone.pop()
            if self._origins.pop(origin.number, None) is None:
                continue
            self._bytes -= origin.size
            for id in origin.return_ids:
                self._by_result.pop(id, None)
            for id, _ in origin.needs:
                source = self._by_result.get(id)
                if source is not None:
                    source.users -= 1
                    if source.users <= 0:
                        gone.append(source)
            self._used(origin)
