"""Stand-ins for what the parts of a process talk to, so that one of them can be tested alone."""

from __future__ import annotations

import collections
import itertools
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from miniray.calls.call import Call, serialize_call
from miniray.calls.calls import CallTable
from miniray.common.object_ref import hooks, new_id
from miniray.exceptions import ObjectStoreFullError
from miniray.messages import protocol as p
from miniray.messages.value import error_value
from miniray.objects.borrowing import Borrowing
from miniray.objects.objects import ObjectTable
from miniray.objects.shared_memory import SharedMemory
from miniray.objects.waiting import ValueFetches
from miniray.values.serialization import serialize

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.messages.value import Value
    from miniray.objects.objects import Entry

NODE = b"node0000"
#: Why a lost value is not made again.
CANNOT = "its owner cannot make it again"


def eventually(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Wait until a condition holds, and return what it gave."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.002)


def shared_memory(link: Any, make_room: Callable[[], object] = lambda: None) -> SharedMemory:
    """That of a process on NODE."""
    fetches = ValueFetches(link, NODE, lambda _entry, _value, _error: None)
    return SharedMemory(link, NODE, fetches, make_room)


class FakePeer:
    """Keeps what is sent to it."""

    direct = True

    def __init__(self, process_id: bytes, node_id: bytes = NODE) -> None:
        self.process_id = process_id
        self.node_id = node_id
        self.lost = False
        self.was = ""
        #: Its node cannot be reached for a while; the process may well live.
        self.unreachable = False
        self.sent: list[tuple[Any, ...]] = []

    def send(self, message: tuple[Any, ...]) -> None:
        self.sent.append(message)

    post = send

    def of_kind(self, kind: int) -> list[tuple[Any, ...]]:
        return [message for message in self.sent if message[0] == kind]

    @property
    def calls(self) -> list[int]:
        """Numbers of the calls that were sent here, in order."""
        return [message[1] for message in self.sent if message[0] == p.PEER_CALL]


class FakePeers:
    """Makes a peer for every address."""

    def __init__(self) -> None:
        self.made: dict[bytes, FakePeer] = {}

    def get(self, node_id: bytes, process_id: bytes) -> FakePeer:
        peer = self.made.get(process_id)
        if peer is None or peer.lost:
            peer = self.made[process_id] = FakePeer(process_id, node_id)
        return peer

    def send_surely(self, node_id: bytes, process_id: bytes, message: tuple[Any, ...]) -> None:
        self.get(node_id, process_id).send(message)


class FakeLink:
    """A daemon that answers at once: it makes memfds as the real one does."""

    def __init__(self) -> None:
        self.notices: list[tuple[Any, ...]] = []
        self.to_head: list[tuple[Any, ...]] = []
        self.segments: dict[int, tuple[int, int]] = {}
        self._numbers = itertools.count(1)
        #: Bytes of the largest value that it takes.
        self.room = 1 << 40
        #: Which of the requests for room may be given disk.
        #: Whether the head knows how processes ended.
        self.hears_of_ends = True

    lost = False

    def node_request(self, method: str, args: tuple[Any, ...], **_how: Any) -> tuple[Any, int]:
        if method == "create_segment":
            size, form, _owner, _owner_node = args
            if size > self.room:
                raise ObjectStoreFullError(needed=size, used=1 << 40, capacity=1 << 40)
            number = next(self._numbers)
            fd = os.memfd_create("test")
            os.ftruncate(fd, size)
            self.segments[number] = (fd, form)
            return (number, number), os.dup(fd)
        assert method == "map_segment"
        _node, number, _home, _size, _request = args
        fd, form = self.segments[number]
        return (number, form, 0), os.dup(fd)

    def node_notice(self, method: str, *args: Any) -> None:
        self.notices.append((method, *args))

    def head_notice(self, method: str, *args: Any) -> None:
        self.to_head.append((method, *args))

    def head_request_async(
        self, method: str, args: tuple[Any, ...], answer: Callable[[Any, Any, int], None]
    ) -> None:
        assert method == "await_end"
        if self.hears_of_ends:
            answer(None, (-9, 7, False, ""), -1)

    def noticed(self, method: str) -> list[tuple[Any, ...]]:
        return [notice[1:] for notice in self.notices if notice[0] == method]

    def head_heard(self, method: str) -> list[tuple[Any, ...]]:
        return [notice[1:] for notice in self.to_head if notice[0] == method]

    def close(self) -> None:
        for fd, _ in self.segments.values():
            os.close(fd)


class FakeLoop:
    """A loop that is run by hand."""

    def __init__(self) -> None:
        self.soon: collections.deque[Callable[[], None]] = collections.deque()
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.thread = threading.Thread()

    def flush_posted(self) -> None:
        pass

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Callable[[], None]:
        entry = (delay, callback)
        self.timers.append(entry)
        return lambda: self.timers.remove(entry)

    def serve(self, _gate: object, _timeout: float | None, *, idle: bool = False) -> bool:
        return False  # there are no sockets: who waits sleeps

    def nudge(self) -> None:
        pass

    def run(self) -> None:
        while self.soon:
            self.soon.popleft()()

    def fire(self) -> None:
        timers, self.timers = self.timers, []
        for _, callback in timers:
            callback()


class Outside:
    """What an ObjectTable asks of the rest of the process, noted."""

    def __init__(self) -> None:
        self.freed: list[Any] = []
        self.unborrowed: list[bytes] = []
        self.unreferenced: list[bytes] = []
        self.unseen: list[Any] = []

    def free_shared(self, value: Any) -> None:
        self.freed.append(value)

    def unborrow(self, id: bytes, owner_node: bytes) -> None:
        self.unborrowed.append(id)

    def actor_unreferenced(self, id: bytes) -> None:
        self.unreferenced.append(id)

    def error_unseen(self, value: Any) -> None:
        self.unseen.append(value)


class Caller:
    """The caller's side of one process without sockets: table, borrowing and calls."""

    def __init__(self, loop: Any = None) -> None:
        hooks.dropped.clear()
        # An id of its own: refs of earlier tests may still be on their way out.
        self.process_id = process_id = new_id()
        self.outside = Outside()
        self.table = ObjectTable(process_id, NODE, self.outside)
        self.peers: Any = FakePeers()
        self.borrowing = Borrowing(self.table, self.peers, lambda _id, _payload: CANNOT)
        self.link: Any = FakeLink()
        self.loop = loop or FakeLoop()
        self.shared_memory = shared_memory(self.link)
        self.lost: list[bytes] = []
        self.calls = CallTable(
            self.table,
            self.borrowing,
            self.shared_memory,
            self.peers,
            self.link,
            self.loop.call_later,
            lambda entry, value: self.recover(entry, value),
        )

    def recover(self, entry: Entry, value: Value) -> str | None:
        """Lost values cannot be made again; tests that need that replace this."""
        return CANNOT

    def call(self, channel: Any, *args: Any, options: Any = None, **how: Any) -> Call:
        """A call with one result; submitting it is the test's."""
        serialized, refs, pins = serialize_call(args, {})
        arguments = self.calls.store(serialized)
        id = self.table.new_id()
        self.results[id] = self.table.create(id)
        return Call(
            number=self.calls.next_number(),
            target="method",
            name="Test.method",
            channel=channel,
            arguments=arguments,
            refs=refs,
            pins=pins,
            return_ids=(id,),
            options=options,
            **how,
        )

    @property
    def results(self) -> dict[bytes, Any]:
        """The refs that a user would hold."""
        return self.__dict__.setdefault("_results", {})  # type: ignore[no-any-return]

    def result_of(self, call: Call) -> Any:
        """The value tuple of a call's result; None while there is none."""
        entry = self.table.entry(call.return_ids[0])
        return None if entry is None else entry.value

    def reply(self, peer: FakePeer, call: Call, result: Any = None) -> None:
        """The executor answers."""
        self.answer(peer, call, p.STATUS_OK, (packed(result),))

    def fails(self, peer: FakePeer, call: Call, error: BaseException) -> None:
        """The executor answers with an error."""
        self.answer(peer, call, p.STATUS_ERROR, (error_value(error),))

    def answer(
        self,
        peer: FakePeer,
        call: Call,
        status: int,
        values: Any,
        borrowed: Any = None,
        seconds: float = 0.05,
        pin: int = 0,
    ) -> None:
        """The executor sends a PEER_REPLY."""
        message = (p.PEER_REPLY, call.number, status, values, borrowed, seconds, pin)
        self.calls.on_reply(peer, message)  # type: ignore[arg-type]

    def drain(self) -> None:
        """Count the refs that were dropped."""
        batch = []
        while hooks.dropped:
            batch.append(hooks.dropped.popleft())
        self.table.drop(batch)


def packed(value: Any) -> tuple[int, Any, tuple[Any, ...]]:
    """A value as it travels."""
    serialized = serialize(value)
    return (serialized.form, serialized.payload(), ())


class Interrupted:
    """A signal comes when it is pickled first, and its handler raises, as those of time limits."""

    def __init__(self) -> None:
        self.errors = [TimeoutError("time limit")]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        if self.errors:
            raise self.errors.pop()
        return (Interrupted, ())
