"""One call that this process has made, and what sends it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

from miniray.common.config import config
from miniray.messages import protocol as p

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.common.object_ref import ObjectRef
    from miniray.objects.objects import Value
    from miniray.objects.streams import StreamState
    from miniray.wire.peers import Peer

#: Where a top-level ref goes in the arguments, its id, its owner's node and, if known, its value.
RefArgument = tuple["int | str", bytes, bytes, "Value | None"]


#: A value that is of no use.
NOTHING: Value = (p.VALUE_PICKLE, b"", ())


class Channel(Protocol):
    """What sends a call."""

    def submit(self, call: Call) -> None:
        """Send it, as soon as all refs among its arguments have values."""

    def dependencies_ready(self, call: Call) -> None:
        """All refs that the call waited for have values (or errors)."""

    def finished(self, call: Call) -> None:
        """The call has its result, or never will."""

    def retry(self, call: Call) -> None:
        """Send the call once more."""

    def withdraw(self, call: Call) -> None:
        """The call did not run, and waits for values of its refs again."""

    def cancel(self, call: Call, force: bool, recursive: bool) -> bool:
        """Cancel; True if the call had not been sent and is withdrawn."""


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
    #: Refs among its arguments that live as long as this is kept, and some that need not.
    pins: list[ObjectRef[Any]]
    #: Whether what no task can make again is kept alive for it.
    keeps: bool
    #: Whether ``return_ids`` are items, of which it may make more.
    of_stream: bool
    #: Its results that live, and origins kept here that need one of its results.
    users: int = 0
    #: Bytes of arguments that it keeps in this process.
    size: int = 0
    #: Calls of it that have not ended, and one more while it is kept: until there are none, its
    #: arguments and ``pins`` are held.
    uses: int = 1
    #: What it keeps alive: objects by id, its own large arguments by its number.
    pinned: list[bytes | int] = dataclasses.field(default_factory=list)

    @property
    def has_large_arguments(self) -> bool:
        """Whether its arguments, other than refs, are in shared memory."""
        return bool(self.arguments[0] == p.VALUE_SHARED)


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """One call, from its submission to its result."""

    #: Method name, or the key of the function.
    target: Any
    #: For messages.
    name: str
    channel: Channel
    #: System failures that may still be survived; -1 is no limit.
    retries: int = 0
    retry_exceptions: bool | tuple[type[BaseException], ...] = False
    #: What its channel must know of it beyond that.
    options: Any = None
    #: It is a task whose results can be made again by running it again.
    repeatable: bool = False
    number: int = 0
    arguments: Value = NOTHING
    refs: Sequence[RefArgument] = ()
    #: Refs that the arguments hold, alive until the reply.
    pins: list[ObjectRef[Any]] | None = None
    return_ids: tuple[bytes, ...] = ()
    stream: StreamState | None = None
    #: What is remembered of it, and keeps its arguments; None if nothing is.
    origin: Origin | None = None
    #: How often it was begun, or will have been.
    tries: int = 1
    #: How many top-level refs have no value yet.
    waiting: int = 0
    #: Where it was sent.
    peer: Peer | None = None
    cancelled: bool = False
    #: Of a call that a running one has made: those of that which have not ended.
    siblings: dict[int, Call] | None = None

    def try_again(self, *, crashed: bool = False) -> float:
        """Count one more run; returns how many seconds after the last it is to be."""
        steps = self.tries - crashed
        self.tries += 1
        if self.retries > 0:
            self.retries -= 1
        return config().retry_delay * (0.0, 0.5, 1.0)[min(steps, 2)]

    @property
    def max_retries(self) -> int | None:
        """The option; None of a task that runs to make a lost value again."""
        if self.origin is not None:
            return None
        return self.retries if self.retries < 0 else self.retries + self.tries - 1

    @property
    def cancel_ids(self) -> tuple[bytes, ...]:
        """Ids by which it can be cancelled: of its results, or of its stream."""
        return self.return_ids if self.stream is None else (self.stream.id,)
