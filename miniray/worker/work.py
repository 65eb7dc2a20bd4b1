"""One piece of work as it arrived at a worker."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


@dataclasses.dataclass(eq=False, slots=True)
class Work:
    """A task or a method call that this worker has to run."""

    caller: Peer
    number: int
    #: Method name, or the key of the function.
    target: Any
    #: For messages: as its caller calls it.
    name: str
    #: Of the function or method itself.
    function_name: str
    arguments: Value
    refs: list[Any]
    return_ids: tuple[bytes, ...]
    group: str | None = None
    #: How many items may wait unread (-1: any number); None: it has a result for each id.
    stream: int | None = None
    #: Its results are those items of a stream that are made once more.
    again: bool = False
    #: Arguments on their way to this node: numbers under which they were asked for.
    ahead: Sequence[int] = ()
    cancelled: bool = False
    #: What it started is cancelled with it.
    recursive: bool = True
    #: What it is to its runtime context, once it runs; knows what it started.
    execution: Execution | None = None
    started: float = 0.0
    #: Refs of the arguments while the call runs; the caller holds them meanwhile.
    held: list[ObjectRef[Any]] | None = None
    #: Items of the stream that the caller took; -1: it reads no further.
    consumed: int = 0
    consumed_changed: Any = None

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
