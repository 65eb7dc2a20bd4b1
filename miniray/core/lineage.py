"""How the results of tasks came about, so that one that was lost can be made again.

Kept by the owner for results in shared memory while they, or what was made from them,
are in use. Arguments are not kept alive for it: those that are gone must be results of
tasks themselves, and are made again first. (Ray keeps those that no task can make again.)
Bookkeeping only: running a task again is for others to do.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from typing import TYPE_CHECKING, Any

from miniray.core import protocol as p

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.core.calls import Call, RefArgument
    from miniray.core.objects import Value


@dataclasses.dataclass(eq=False)
class Origin:
    """A task that has run: all that is needed to run it once more."""

    number: int
    target: Any
    name: str
    #: Of a generator: its items so far, which one more run makes as so many results.
    return_ids: Sequence[bytes]
    arguments: Value
    #: Top-level refs; small ones with their values.
    refs: list[RefArgument]
    #: What must exist for it to run: (object id, its owner's node).
    needs: tuple[tuple[bytes, bytes], ...]
    #: Shape of its lease.
    options: Any
    #: How often it may still run again; -1: any number of times.
    retries: int
    retry_exceptions: bool | tuple[type[BaseException], ...]
    #: Its results that live, and origins kept here that need one of its results.
    users: int = 0
    #: Bytes of arguments that it keeps.
    size: int = 0


class Lineage:
    """The origins of this process's results, bounded in number and size. Thread-safe."""

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._bytes = 0
        self._numbers = itertools.count(1).__next__
        self._by_result: dict[bytes, Origin] = {}
        #: In order of arrival: the oldest are given up first.
        self._origins: collections.OrderedDict[int, Origin] = collections.OrderedDict()
        # Reentrant: a garbage collection may run user code, which may drop refs, anywhere.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._origins)

    def keep(self, call: Call, refs: list[RefArgument], results: int) -> bool:
        """Remember the task of a call that ended well; False if it cannot be repeated.

        Args:
            call: which one.
            refs: its top-level refs, with the values that they have now.
            results: how many of its results are in use, each of which is to be forgotten.
        """
        origin = self._origin(call, refs, call.return_ids)
        if origin is None:
            return False
        origin.users = results
        with self._lock:
            if any(id in self._by_result for id in origin.return_ids):
                return True  # it ran again: what is known of it stays good
            for id in origin.return_ids:
                self._by_result[id] = origin
            self._enter(origin)
        return True

    def stream(self, call: Call, refs: list[RefArgument], items: Sequence[bytes]) -> Origin | None:
        """What the items of a generator are made again from; None if they cannot be.

        Args:
            call: its call.
            refs: as of ``keep``.
            items: ids of the items so far, which grows.
        """
        return self._origin(call, refs, items)

    def keep_item(self, origin: Origin, id: bytes) -> None:
        """Remember a generator for one more of its items, which is to be forgotten."""
        with self._lock:
            self._by_result[id] = origin
            origin.users += 1
            if origin.number not in self._origins:
                self._enter(origin)

    def _origin(
        self, call: Call, refs: list[RefArgument], return_ids: Sequence[bytes]
    ) -> Origin | None:
        if call.retries == 0 or call.arguments[0] == p.VALUE_SHARED:
            return None
        kept: list[RefArgument] = []
        needs = list(call.arguments[2])
        size = len(call.arguments[1])
        for where, id, node, value in refs:
            if value is not None and value[0] != p.VALUE_SHARED:
                kept.append((where, id, node, value))
                needs.extend(value[2])
                size += len(value[1])
            else:
                kept.append((where, id, node, None))
                needs.append((id, node))
        return Origin(
            self._numbers(),
            call.target,
            call.name,
            return_ids,
            call.arguments,
            kept,
            tuple((id, node) for id, node in needs if node),
            call.options,
            call.retries,
            call.retry_exceptions,
            size=size,
        )

    def _enter(self, origin: Origin) -> None:
        for id, _ in origin.needs:
            source = self._by_result.get(id)
            if source is not None:
                source.users += 1
        self._origins[origin.number] = origin
        self._bytes += origin.size
        while len(self._origins) > self._max_calls or self._bytes > self._max_bytes:
            self._remove([next(iter(self._origins.values()))])

    def find(self, id: bytes) -> Origin | None:
        """What made a result."""
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
        """A result that was gone is to be made again for a while."""
        with self._lock:
            origin = self._by_result.get(id)
            if origin is not None:
                origin.users += 1

    def forget(self, id: bytes) -> None:
        """A result is not in use any more."""
        with self._lock:
            origin = self._by_result.get(id)
            if origin is not None:
                origin.users -= 1
                if origin.users <= 0:
                    self._remove([origin])

    def _remove(self, gone: list[Origin]) -> None:
        """Drop origins, and those that only they needed: a loop, for chains can be long."""
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
