"""Ids, and ``ObjectRef``: the name of a value that exists, or will exist, in the cluster.

A process, a node and a job have random ids of 8 bytes; the objects of a process have its id and a
number, so that each id of an object names its owner.

A ref holds an id and where its owner lives, nothing else; values, counts and
waiters are the runtime's. Dropping a ref only appends its id to a queue, since
``__del__`` may run at any point of any thread.
"""

from __future__ import annotations

import abc
import collections
import itertools
import os
import struct
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from miniray.common.absent import AbsentAttribute

if TYPE_CHECKING:
    import asyncio
    import concurrent.futures
    from collections.abc import Callable, Coroutine, Generator

T_co = TypeVar("T_co", covariant=True)

#: Bytes of the id of a process (driver, worker), of a node and of a job.
PROCESS_ID_LENGTH = 8
#: Hex digits of a creator that are enough for people.
_SHORT = 8
_NUMBER = struct.Struct(">Q")


def new_id() -> bytes:
    """Return a random id of 8 bytes."""
    return os.urandom(PROCESS_ID_LENGTH)


def owner_of(object_id: bytes) -> bytes:
    """Return the id of the process that owns an object (or created an actor)."""
    return object_id[:PROCESS_ID_LENGTH]


def short_id(id: str) -> str:
    """Return an id in hex of something that a process made, short but still distinct.

    It names its creator and a number there: the first digits alone are those of all that it made.
    """
    creator = 2 * PROCESS_ID_LENGTH
    return f"{id[:_SHORT]}-{int(id[creator:] or '0', 16)}"


def call_id(caller: bytes, number: int) -> bytes:
    """Return the id of a call that makes no object of its own; never that of an object."""
    return caller + _NUMBER.pack(1 << 63 | number)


class ObjectIds:
    """Numbers the objects that this process creates. Thread-safe."""

    __slots__ = ("_next", "_prefix")

    def __init__(self, process_id: bytes) -> None:
        self._prefix = process_id
        self._next = itertools.count(1).__next__  # one C call: atomic under the GIL

    def new(self) -> bytes:
        return self._prefix + _NUMBER.pack(self._next())


def _no_runtime(_what: str) -> Any:
    raise RuntimeError("miniray has not been imported in this process")


class RefHooks:
    """What the runtime of this process records about refs.

    ``dropped`` receives the id of each counted ref that went away. ``runtime`` gives the runtime of
    this process, or raises the error that says why there is none.
    """

    __slots__ = ("deserialized", "dropped", "runtime", "serialized", "wake", "woken")

    def __init__(self) -> None:
        self.dropped: collections.deque[bytes] = collections.deque()
        self.runtime: Callable[[str], Any] = _no_runtime
        self.woken = False
        self.wake: Callable[[], None] | None = None
        self.serialized: Callable[[ObjectRef[Any]], None] | None = None
        self.deserialized: Callable[[bytes, bytes], ObjectRef[Any]] | None = None

    def begin(
        self,
        wake: Callable[[], None],
        serialized: Callable[[ObjectRef[Any]], None],
        deserialized: Callable[[bytes, bytes], ObjectRef[Any]],
    ) -> None:
        """Count refs from now on.

        Args:
            wake: Called when a ref is dropped while no check is planned.
            serialized: Called for each ref that is being pickled.
            deserialized: Makes each ref that is unpickled.
        """
        self.dropped = collections.deque()
        self.woken = False
        self.wake, self.serialized, self.deserialized = wake, serialized, deserialized

    def end(self) -> None:
        """Count refs no more."""
        self.wake = self.serialized = self.deserialized = None

    def abandon(self) -> None:
        """Count no more in a forked child: refs of the parent go uncounted."""
        self.end()
        self.dropped = collections.deque(maxlen=0)

    def call(self) -> None:
        """Make the runtime look at the dropped refs. Takes no lock."""
        wake = self.wake
        if wake is not None and not self.woken:
            self.woken = True
            wake()


hooks = RefHooks()


class ObjectRef(Generic[T_co], metaclass=abc.ABCMeta):
    """A reference to a value, as returned by ``remote()`` and ``put()``.

    Refs compare and hash by their id, can be awaited, turned into a
    ``concurrent.futures.Future``, passed to tasks and actors, and put inside
    other values. An engine with refs of its own registers their class here.
    """

    __slots__ = ("__weakref__", "_id", "_owner_node")

    def __init__(self, id: bytes, owner_node: bytes) -> None:
        #: Id: the owner's process id in the cluster (8 bytes) and a number (8 bytes).
        self._id = id
        #: Id of the node where the owner runs; empty for an uncounted ref.
        self._owner_node = owner_node

    def __del__(self) -> None:
        state = hooks
        try:
            if state is None or not self._owner_node:  # interpreter shutdown, or uncounted
                return
        except AttributeError:  # it was never made, for lack of arguments
            return
        counted = True  # no signal is looked at from here until it is, see ignored_signals.py
        state.dropped.append(self._id)
        if counted and not state.woken:
            state.call()

    def binary(self) -> bytes:
        """Return the id as 16 bytes."""
        return self._id

    def hex(self) -> str:
        """Return the id as 32 hexadecimal digits."""
        return self._id.hex()

    def is_nil(self) -> bool:
        """Return False: every ref is that of a value, while Ray has one of none too."""
        return False

    if not TYPE_CHECKING:  # else a type checker takes them for attributes
        task_id = AbsentAttribute("in the task, get_runtime_context().get_task_id() has it")
        job_id = AbsentAttribute("get_runtime_context().get_job_id() has that of the program")
        owner_address = AbsentAttribute(
            "miniray.util.state.list_objects() shows each object's owner"
        )
        call_site = AbsentAttribute("miniray.util.state.list_objects() shows where each was made")
        size = AbsentAttribute("len(ref.binary()) is the length of its id")
        from_binary = AbsentAttribute("pass the ref itself; an id does not keep the value")
        from_hex = AbsentAttribute("pass the ref itself; an id does not keep the value")
        from_random = AbsentAttribute("put() makes refs, each of a value")
        nil = AbsentAttribute("every ref is that of a value; use None for none")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectRef) and self._id == other._id

    def __hash__(self) -> int:
        return hash(self._id)

    def __lt__(self, other: ObjectRef[Any]) -> bool:
        return self._id < other._id

    def __copy__(self) -> ObjectRef[T_co]:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> ObjectRef[T_co]:
        return self

    def __repr__(self) -> str:
        return f"ObjectRef({self._id.hex()})"

    def __reduce__(self) -> tuple[Callable[[bytes, bytes], ObjectRef[Any]], tuple[bytes, bytes]]:
        if hooks.serialized is not None:
            hooks.serialized(self)
        return rebuild_ref, (self._id, self._owner_node)

    def future(self) -> concurrent.futures.Future[T_co]:
        """Return a ``concurrent.futures.Future`` that gets this ref's value or its error."""
        made: concurrent.futures.Future[T_co] = hooks.runtime("ref").objects.future(self)
        return made

    def as_future(self) -> asyncio.Future[T_co]:
        """Return an ``asyncio.Future`` of the running event loop that gets this ref's value."""
        import asyncio

        value: Coroutine[Any, Any, T_co] = hooks.runtime("ref").objects.value_of(self)
        return asyncio.ensure_future(value)

    def __await__(self) -> Generator[Any, None, T_co]:
        found: Generator[Any, None, T_co] = hooks.runtime("ref").objects.value_of(self).__await__()
        return found


def rebuild_ref(id: bytes, owner_node: bytes) -> ObjectRef[Any]:
    """Make a ref from its pickled form and register it with the runtime."""
    if hooks.deserialized is not None:
        return hooks.deserialized(id, owner_node)
    return ObjectRef(id, b"")
