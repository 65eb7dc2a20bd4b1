"""One piece of work as it arrived at a worker, and how its arguments become Python values."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from miniray.core import protocol as p
from miniray.core.serialization import deserialize
from miniray.exceptions import ObjectLostError

if TYPE_CHECKING:
    from miniray.core.cluster_runtime import ClusterRuntime
    from miniray.core.objects import Value
    from miniray.core.peers import Peer
    from miniray.object_ref import ObjectRef


class ArgumentLostError(Exception):
    """The value of a ref among the arguments is gone; the caller may have it made again."""

    def __init__(self, id: bytes, payload: Any) -> None:
        super().__init__(f"the value of ObjectRef({id.hex()}) is gone")
        self.id = id
        self.payload = payload


class Work:
    """A task or a method call that this worker has to run."""

    __slots__ = (
        "ahead",
        "arguments",
        "caller",
        "cancelled",
        "consumed",
        "consumed_changed",
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
        self.arguments = arguments
        self.refs = refs
        self.return_ids = return_ids
        self.group = group
        self.stream = stream
        #: Arguments on their way to this node: numbers under which they were asked for.
        self.ahead: list[int] = []
        self.cancelled = False
        #: What it started is cancelled with it.
        self.recursive = True
        self.started = 0.0
        #: Refs of the arguments while the call runs; the caller holds them meanwhile.
        self.held: list[ObjectRef[Any]] | None = None
        #: Items of the stream that the caller took; -1: it reads no further.
        self.consumed = 0
        self.consumed_changed: Any = None

    @property
    def cancels_children(self) -> bool:
        """Whether what it started is to be cancelled too."""
        return self.cancelled and self.recursive

    def begin(self) -> None:
        """Note when it began."""
        self.started = time.perf_counter()


def load_arguments(runtime: ClusterRuntime, work: Work) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a piece of work; refs in them are borrowed for its time."""
    contained = work.arguments[2]
    for _, _, _, value in work.refs:
        if value is not None and value[2]:
            contained = (*contained, *value[2])
    if contained:
        adopt = runtime.table.adopt
        work.held = [adopt(id, node)[0] if node else _plain_ref(id) for id, node in contained]
    try:
        return _load_all(runtime, work)
    finally:
        forget_arguments(runtime, work)


def fetch_arguments(runtime: ClusterRuntime, work: Work) -> None:
    """Begin to move what a piece of work will read; it may wait for a while in the queue."""
    values = [value for *_, value in work.refs if value is not None] if work.refs else []
    if work.arguments[0] == p.VALUE_SHARED:
        values.append(work.arguments)
    if values:
        work.ahead = runtime.shared_memory.fetches.prefetch(values)


def forget_arguments(runtime: ClusterRuntime, work: Work) -> None:
    """What ``fetch_arguments`` began is not needed any more, or in use."""
    if work.ahead:
        ahead, work.ahead = work.ahead, []
        runtime.shared_memory.fetches.withdraw(ahead)


def _load_all(runtime: ClusterRuntime, work: Work) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = load_value(runtime, work.arguments)
    if work.refs:
        positional = list(args)
        for where, id, _node, value in work.refs:
            try:
                item = load_value(runtime, value)
            except ObjectLostError as error:
                if value[0] != p.VALUE_SHARED:
                    raise
                raise ArgumentLostError(id, value[1]) from error
            if isinstance(where, int):
                positional[where] = item
            else:
                kwargs[where] = item
        args = tuple(positional)
    return args, kwargs


def load_value(runtime: ClusterRuntime, value: Value) -> Any:
    """The Python value of a value that came with a message."""
    if value[0] == p.VALUE_SHARED:
        mapping, block = runtime.shared_memory.map(value[1])
        return deserialize(mapping.form, memoryview(block).cast("B"), mapped=True)
    return deserialize(value[0], value[1])


def _plain_ref(id: bytes) -> ObjectRef[Any]:
    from miniray.object_ref import ObjectRef

    return ObjectRef(id, b"")
