"""Calls that this worker has to run: their fields, arguments, methods, the queue.

Arguments are fetched ahead while a call is queued, and loaded when its turn has come.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from typing import TYPE_CHECKING, Any, NoReturn

from miniray.common.object_ref import ObjectRef
from miniray.common.spans import SPANS
from miniray.exceptions import ObjectLostError
from miniray.messages import protocol as p
from miniray.messages.value import ActorExit, is_shared, refs_in
from miniray.values.serialization import deserialize
from miniray.wire.interrupts import in_main_thread, signal_of
from miniray.wire.io_loop import Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from miniray.calls.call import RefArgument
    from miniray.calls.context import Execution
    from miniray.client.cluster_runtime import ClusterRuntime
    from miniray.messages.value import Value
    from miniray.wire.io_loop import IOLoop
    from miniray.wire.peers import Peer

#: Positional arguments, and the others.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

#: The concurrency group of methods that name none.
DEFAULT_GROUP = "_default"


class ArgumentLostError(Exception):
    """The value of a ref among the arguments is gone; the caller may have it made again."""

    def __init__(self, id: bytes, payload: Any) -> None:
        super().__init__(f"the value of ObjectRef({id.hex()}) is gone")
        self.id = id
        self.payload = payload


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Work:
    """A task or a method call."""

    caller: Peer
    number: int
    #: Method name, or the key of the function.
    target: Any
    #: Its runtime context: whether it is cancelled, and what it has started.
    execution: Execution
    arguments: Value
    refs: list[RefArgument]
    return_ids: tuple[bytes, ...]
    group: str | None = None
    #: How many items may wait unread (-1: any number); None: it has a result for each id.
    stream: int | None = None
    #: Its results are those items of a stream that are made once more.
    again: bool = False
    #: Arguments on their way to this node: numbers of their requests.
    ahead: Sequence[int] = ()
    #: What it started is cancelled with it.
    recursive: bool = True
    #: When it began (``time.perf_counter``); 0: it has not.
    started: float = 0.0
    #: Refs of the arguments while the call runs; the caller holds them meanwhile.
    held: list[ObjectRef[Any]] | None = None
    #: Arguments that were loaded before its turn.
    loaded: Arguments | None = None
    #: Items of the stream that the caller took; -1: it reads no further.
    consumed: int = 0
    #: Set when ``consumed`` has changed, or when the sent items are written.
    consumed_changed: Any = None

    @property
    def key(self) -> tuple[bytes, int]:
        return self.caller.process_id, self.number

    @property
    def name(self) -> str:
        """For messages: as its caller calls it."""
        return self.execution.name

    @property
    def is_task(self) -> bool:
        """Whether it is a task, and no method of an actor."""
        return isinstance(self.target, bytes)


def unknown_group(work: Work, groups: Iterable[str]) -> ValueError:
    """Make the error of a call into a concurrency group that the actor does not have."""
    known = ", ".join(map(repr, sorted(set(groups) - {DEFAULT_GROUP}))) or "none"
    return ValueError(
        f"{work.name} was called in concurrency group {work.group!r}. The actor's "
        f"concurrency_groups: {known}."
    )


class WorkQueue:
    """A queue that any thread puts into; one takes, and handles messages while it waits."""

    def __init__(self, loop: IOLoop) -> None:
        self._loop = loop
        self._items: collections.deque[Work | None] = collections.deque()
        self._gate: Gate | None = None

    def put(self, work: Work | None) -> None:
        """Add work; None ends the queue."""
        self._items.append(work)
        gate = self._gate
        if gate is not None:
            gate.arrived()

    def get(self) -> Work | None:
        """Take the next piece of work; wait for it."""
        items = self._items
        while True:
            if items:
                try:
                    return items.popleft()
                except IndexError:  # taken back by another thread meanwhile
                    continue
            self._loop.flush_posted()
            self._gate = gate = Gate(self._loop)
            if not items:  # else it came just before there was a gate
                gate.wait(None, idle=True)
            self._gate = None

    def take(self) -> Work | None:
        """Take the next one.

        Raises:
            IndexError: The queue is empty.
        """
        return self._items.popleft()

    def first(self) -> Work | None:
        """Return the next one, which stays."""
        try:
            return self._items[0]
        except IndexError:
            return None

    def remove(self, work: Work) -> bool:
        """Take this piece of work out; False if it does not wait here."""
        try:
            self._items.remove(work)
        except ValueError:
            return False
        return True

    def empty(self) -> bool:
        return not self._items


#: What executors do not take for the error of a call.
NOT_ERRORS = (SystemExit, KeyboardInterrupt, asyncio.CancelledError)


class ValueRaisedError(Exception):
    """Carries one of ``NOT_ERRORS``, as its cause, to where a call is answered.

    ``SystemExit`` of a task's own code ends its process, and ``KeyboardInterrupt`` or
    ``CancelledError`` counts as its cancel. Out of the ``__setstate__`` of an argument, or of a
    module that a function needs, they are the call's error, as all others are.
    Exceptions that a signal's handler raised at that time keep their meaning.
    """


def raise_as_error(error: BaseException) -> NoReturn:
    """Raise one of ``NOT_ERRORS`` again: carried, unless a signal's handler raised it."""
    if in_main_thread() and signal_of(type(error), error.__traceback__) is not None:
        raise error
    raise ValueRaisedError from error


def carried(error: BaseException) -> BaseException:
    """Return what an exception carries, or the exception."""
    if type(error) is ValueRaisedError:  # `isinstance` runs code of the user's class
        return error.__cause__ or error
    return error


# --- arguments -------------------------------------------------------------------------


def load_arguments(runtime: ClusterRuntime, work: Work) -> Arguments:
    """Load the arguments of a piece of work; refs in them are borrowed for its time.

    Raises:
        ValueRaisedError: Unpickling has raised what is no error by itself.
    """
    form, payload, contained = work.arguments
    if not contained and not work.refs and form != p.VALUE_SHARED:  # they came with the call
        try:
            return deserialize(form, payload)  # type: ignore[no-any-return]
        except NOT_ERRORS as error:
            raise_as_error(error)
    return _load_these(runtime, work)


def _load_held(runtime: ClusterRuntime, work: Work) -> Arguments:
    """Load arguments, some of which are refs or in shared memory."""
    _, _, contained = work.arguments
    for _, _, _, value in work.refs:
        if value is not None:
            contained = (*contained, *refs_in(value))
    if contained:
        adopt = runtime.table.adopt
        work.held = [adopt(id, node)[0] if node else ObjectRef(id, b"") for id, node in contained]
    try:
        return _load_all(runtime, work.arguments, work.refs)
    except NOT_ERRORS as error:
        raise_as_error(error)


def _load_timed(runtime: ClusterRuntime, work: Work) -> Arguments:
    with SPANS.timed("arguments", work.name):
        return _load_held(runtime, work)


def _switch(recorded: bool) -> None:
    global _load_these
    _load_these = _load_timed if recorded else _load_held


_load_these = _load_held
SPANS.switches.add(_switch)


def load_for_constructor(
    runtime: ClusterRuntime, arguments: Value, refs: list[RefArgument]
) -> tuple[tuple[Any, ...], dict[str, Any], list[ObjectRef[Any]]]:
    """Load the arguments of an actor's constructor.

    Values in shared memory are read as by any borrower: their location when the actor was made is a
    first guess. If one was lost, as with the actor's former node, its owner knows the new location,
    or makes it again.

    Returns:
        Positional arguments, the others, and their refs, which are to be held while it runs. These
        live as long as this process wants, not as long as a call.

    Raises:
        MinirayError: A value is lost for good, or its owner is.
    """
    held: list[ObjectRef[Any]] = []

    def hold_inside(value: Value) -> list[ObjectRef[Any]]:
        refs = runtime.borrowing.hold(refs_in(value))
        held.extend(refs)
        return refs

    hold_inside(arguments)
    small: list[RefArgument] = []
    large: list[RefArgument] = []
    for ref in refs:
        _, _, _, value = ref
        (large if value is None or is_shared(value) else small).append(ref)
    wanted = runtime.borrowing.hold([(id, node) for _, id, node, _ in large])
    for _, id, _, value in large:
        if value is not None:
            runtime.table.set_value(id, value, hold_inside(value))
    for _, _, _, value in small:
        if value is not None:
            hold_inside(value)
    try:
        args, kwargs = _load_all(runtime, arguments, small)
        if wanted:
            found = runtime.objects.get(wanted, None)
            places = (where for where, _, _, _ in large)
            args = _put_in(args, kwargs, zip(places, found, strict=True))
    except NOT_ERRORS as error:
        raise_as_error(error)
    return args, kwargs, [*held, *wanted]


def _put_in(
    args: tuple[Any, ...], kwargs: dict[str, Any], values: Iterable[tuple[int | str, Any]]
) -> tuple[Any, ...]:
    """Put the values of refs where these stood; return the positional arguments."""
    positional = list(args)
    for where, value in values:
        if isinstance(where, int):
            positional[where] = value
        else:
            kwargs[where] = value
    return tuple(positional)


def _shared(work: Work) -> list[Value]:
    """Return the values among the arguments that are in shared memory."""
    values = [value for _, _, _, value in work.refs if value is not None and is_shared(value)]
    return [work.arguments, *values] if is_shared(work.arguments) else values


def reads_shared_memory(work: Work) -> bool:
    """Return whether loading the arguments may wait for a disk or another node."""
    return bool(_shared(work)) if work.refs else is_shared(work.arguments)


def fetch_arguments(runtime: ClusterRuntime, work: Work) -> None:
    """Begin to move what a piece of work will read, as it may wait in the queue."""
    if work.refs or is_shared(work.arguments):
        values = _shared(work)
        if values:
            work.ahead = runtime.shared_memory.fetches.prefetch(values)


def forget_arguments(runtime: ClusterRuntime, work: Work) -> None:
    """Withdraw requests of ``fetch_arguments`` that are no longer needed."""
    if work.ahead:
        ahead, work.ahead = work.ahead, []
        runtime.shared_memory.fetches.withdraw(ahead)


def _load_all(runtime: ClusterRuntime, arguments: Value, refs: list[RefArgument]) -> Arguments:
    args, kwargs = _load(runtime, arguments)
    if refs:
        args = _put_in(args, kwargs, _ref_values(runtime, refs))
    return args, kwargs


def _ref_values(
    runtime: ClusterRuntime, refs: list[RefArgument]
) -> Iterator[tuple[int | str, Any]]:
    for where, id, _node, value in refs:
        if value is None:  # it was lost when the call was sent: the caller makes it again
            raise ArgumentLostError(id, None)
        yield where, _load(runtime, value, id)


def _load(runtime: ClusterRuntime, value: Value, id: bytes | None = None) -> Any:
    """Load a value that came with a message.

    Args:
        runtime: The process's runtime.
        value: The value.
        id: Of the object whose value it is, if it is an object's.

    Raises:
        ArgumentLostError: An object's value is gone. What unpickling raises is the call's error, an
            ObjectLostError of another value too.
    """
    form, payload, _ = value
    if form != p.VALUE_SHARED:
        return deserialize(form, payload)
    try:
        form, block = runtime.shared_memory.map(payload)
    except ObjectLostError as error:
        if id is None:
            raise
        raise ArgumentLostError(id, payload) from error
    return deserialize(form, memoryview(block).cast("B"), mapped=True)


# --- methods ---------------------------------------------------------------------------


def _ready(_instance: Any) -> bool:
    return True


def _terminate(_instance: Any) -> None:
    raise ActorExit


def _call(instance: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(instance, *args, **kwargs)


#: Methods of the user's class that run at the planned exit of an actor; Ray's name is an alias.
SHUTDOWN = ("__miniray_shutdown__", "__ray_shutdown__")

#: What is called with the actor's instance, by name; Ray's names are aliases.
BUILT_IN: dict[str, Callable[..., Any]] = {
    "__miniray_ready__": _ready,
    "__ray_ready__": _ready,
    "__miniray_terminate__": _terminate,
    "__ray_terminate__": _terminate,
    "__miniray_call__": _call,
    "__ray_call__": _call,
}


def method_of(instance: Any, name: str) -> Callable[..., Any]:
    """Find a method of the actor's class; attributes of the instance do not hide it, as in Ray."""
    if name in getattr(instance, "__dict__", ()):
        cls = type(instance)
        for base in cls.__mro__:
            if name in base.__dict__:
                found = base.__dict__[name]
                bind = getattr(found, "__get__", None)
                return found if bind is None else bind(instance, cls)  # type: ignore[no-any-return]
    return getattr(instance, name)  # type: ignore[no-any-return]
