"""One piece of work as it arrived at a worker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from miniray.messages import protocol as p

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miniray.calls.context import Execution
    from miniray.common.object_ref import ObjectRef
    from miniray.objects.objects import Value
    from miniray.wire.peers import Peer


#: The concurrency group of methods that name none.
DEFAULT_GROUP = "_default"


class ArgumentLostError(Exception):
    """The value of a ref among the arguments is gone; the caller may have it made again."""

    def __init__(self, id: bytes, payload: Any) -> None:
        super().__init__(f"the value of ObjectRef({id.hex()}) is gone")
        self.id = id
        self.payload = payload


class Work:
    """A task or a method call that this worker has to run."""

    __slots__ = (
        "again",
        "ahead",
        "arguments",
        "caller",
        "cancelled",
        "consumed",
        "consumed_changed",
        "execution",
        "function_name",
        "group",
        "held",
        "name",
        "number",
        "recursive",
        "refs",
        "return_ids",
        "started",
        "stream",
        "target",
    )

    def __init__(
        self,
        caller: Peer,
        number: int,
        target: Any,
        name: str,
        arguments: Value,
        refs: list[Any],
        return_ids: tuple[bytes, ...],
        group: str | None,
        stream: int | None,
    ) -> None:
        self.caller = caller
        self.number = number
        self.target = target
        self.name = name
        self.function_name = name
        self.arguments = arguments
        self.refs = refs
        self.return_ids = return_ids
        self.group = group
        #: Its results are those items of a stream that are made once more.
        self.again = stream == p.STREAM_AGAIN
        #: How many items may wait unread (-1: any number); None: it has a result for each id.
        self.stream = None if self.again else stream
        #: Arguments on their way to this node: numbers under which they were asked for.
        self.ahead: list[int] = []
        self.cancelled = False
        #: What it started is cancelled with it.
        self.recursive = True
        #: What it is to its runtime context, once it runs; knows what it started.
        self.execution: Execution | None = None
        self.started = 0.0
        #: Refs of the arguments while the call runs; the caller holds them meanwhile.
        self.held: list[ObjectRef[Any]] | None = None
        #: Items of the stream that the caller took; -1: it reads no further.
        self.consumed = 0
        self.consumed_changed: Any = None

    def begin(self) -> None:
        """Note when it began."""
        self.started = time.perf_counter()


def unknown_group(work: Work, groups: Iterable[str]) -> ValueError:
    """The error for a call into a concurrency group that the actor does not have."""
    known = ", ".join(map(repr, sorted(set(groups) - {DEFAULT_GROUP}))) or "none"
    return ValueError(
        f"{work.name} was called in concurrency group {work.group!r}. The actor's "
        f"concurrency_groups: {known}."
    )
