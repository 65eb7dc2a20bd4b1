"""The drivers and workers of the cluster: where each is attached, how to reach it, how it ended.

Responsible for the directory, for answers and pushes. The observers in ``on_ended`` handle
what ends with a process.
"""

from __future__ import annotations

import dataclasses
import marshal
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray._proto import common_pb2
from miniray.common.names import format_bytes
from miniray.messages.protocol import MAX_HEAD_REQUEST
from miniray.messages.value import encode_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.head.directories.grants import Timers
    from miniray.head.directories.jobs import JobDirectory
    from miniray.head.directories.nodes import ClusterNode, NodeDirectory

    Waiter = tuple[bytes, int]


class ProcessExit(NamedTuple):
    #: Exit code, negative for a signal; None: unknown.
    code: int | None = None
    pid: int = 0
    #: It was a planned exit.
    planned: bool = False
    #: Its node was lost with it.
    with_node: bool = False
    #: Further details, as a sentence.
    detail: str = ""


@dataclasses.dataclass(eq=False, repr=False)
class AttachedProcess:
    """A driver or worker that is attached to a node."""

    id: bytes
    node: ClusterNode
    pid: int
    is_driver: bool
    job_id: bytes
    #: When it attached, in seconds since the epoch.
    since: float = dataclasses.field(default_factory=time.time)


class ClientDirectory:
    """Attached processes by id."""

    def __init__(self, nodes: NodeDirectory) -> None:
        self._nodes = nodes
        self._clients: dict[bytes, AttachedProcess] = {}
        #: Called with each process that ended, in this order.
        self.on_ended: list[Callable[[bytes, ProcessExit], None]] = []

    def attach(self, client: AttachedProcess) -> None:
        self._clients[client.id] = client

    def get(self, process_id: bytes) -> AttachedProcess | None:
        return self._clients.get(process_id)

    def node_of(self, process_id: bytes) -> ClusterNode | None:
        """Return where a process is attached; a daemon's own id is that of its node."""
        client = self._clients.get(process_id)
        return client.node if client is not None else self._nodes.get(process_id)

    def all(self) -> list[AttachedProcess]:
        return list(self._clients.values())

    def ended(self, process_id: bytes, how: ProcessExit) -> None:
        """Remove a process, which may never have attached, and notify the observers."""
        self._clients.pop(process_id, None)
        for hook in self.on_ended:
            hook(process_id, how)

    def node_lost(self, node: ClusterNode) -> None:
        why = f"Node {node.name} is gone: {node.reason}."
        for client in [each for each in self._clients.values() if each.node is node]:
            self.ended(client.id, ProcessExit(pid=client.pid, with_node=True, detail=why))
        for hook in self.on_ended:  # its daemon
            hook(node.id, ProcessExit(with_node=True, detail=why))

    def push(self, process_id: bytes, topic: str, *body: Any) -> bool:
        """Push to a process, or to a daemon under its node's id; False if it is not there."""
        node = self.node_of(process_id)
        if node is None:
            return False
        node.send(
            push=common_pb2.ClientPush(process_id=process_id, topic=topic, body=marshal.dumps(body))
        )
        return True

    def answer(self, process_id: bytes, request: int, result: Any) -> None:
        """Answer a request of a process, or of a daemon under its node's id.

        Raises:
            ValueError: The answer is too large, or cannot travel.
        """
        body = marshal.dumps(result)
        if len(body) > MAX_HEAD_REQUEST:
            # The daemon would not take it, and its session would end.
            raise ValueError(
                f"The answer takes {format_bytes(len(body))}, and may take "
                f"{format_bytes(MAX_HEAD_REQUEST)}. Ask for less at once."
            )
        self._reply(process_id, request, b"", body)

    def refuse(self, process_id: bytes, request: int, error: BaseException) -> None:
        self._reply(process_id, request, encode_error(error), b"")

    def _reply(self, process_id: bytes, request: int, error: bytes, body: bytes) -> None:
        node = self.node_of(process_id)
        if node is not None:
            node.send(
                reply=common_pb2.ClientReply(
                    process_id=process_id, request=request, error=error, body=body
                )
            )


#: Ended processes that are remembered.
REMEMBERED = 1000
#: Seconds after which the answer is that the end is unknown: a process may only have lost its
#: socket, or have ended under an earlier head.
UNTIL_UNKNOWN = 10.0


@dataclasses.dataclass(eq=False, repr=False)
class ProcessEnds:
    """How processes ended recently, for the peers that saw a process's socket close."""

    _clients: ClientDirectory
    _timers: Timers

    def __post_init__(self) -> None:
        self._known: dict[bytes, ProcessExit] = {}
        #: Why processes are being ended, until their end is reported.
        self._reasons: dict[bytes, str] = {}
        self._waiting: dict[bytes, list[Waiter]] = {}
        self._clients.on_ended.append(self._ended)

    def wait(self, waiter: Waiter, process_id: bytes) -> None:
        """Answer a request once it is known how a process ended.

        The answer is (exit code or None, pid or 0, whether its node was lost, further details).
        """
        known = self._known.get(process_id)
        if known is not None:
            self._answer(waiter, known)
            return
        waiting = self._waiting.setdefault(process_id, [])
        waiting.append(waiter)
        if len(waiting) == 1:
            unknown = ProcessExit()
            self._timers.call_later(UNTIL_UNKNOWN, lambda: self._publish(process_id, unknown))

    def explain(self, process_id: bytes, reason: str) -> None:
        """Record why a process is about to be ended, as a sentence."""
        self._reasons[process_id] = reason

    def _ended(self, process_id: bytes, how: ProcessExit) -> None:
        reason = self._reasons.pop(process_id, None)
        if reason is not None:
            # The exit code is of no use: a signal would look like the kernel's doing.
            how = how._replace(code=None, detail=reason)
        self._known[process_id] = how
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        self._publish(process_id, how)

    def _publish(self, process_id: bytes, how: ProcessExit) -> None:
        for waiter in self._waiting.pop(process_id, ()):
            self._answer(waiter, how)

    def _answer(self, waiter: Waiter, how: ProcessExit) -> None:
        self._clients.answer(*waiter, (how.code, how.pid, how.with_node, how.detail))


#: Seconds until a driver is notified, and between two notices for each waiting request:
#: each is examined at the driver's request, which takes some microseconds.
_GATHER, _EACH = 0.5, 100e-6


@dataclasses.dataclass(eq=False, repr=False)
class DriverNews:
    """Notifies drivers, not often, that work of their jobs waits; they request which and why."""

    clients: ClientDirectory
    jobs: JobDirectory
    timers: Timers
    #: Drivers with a notice under way; and the earliest time of the next one for each.
    _soon: set[bytes] = dataclasses.field(default_factory=set, init=False)
    _next: dict[bytes, float] = dataclasses.field(default_factory=dict, init=False)
    _waiting: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.clients.on_ended.append(self._ended)

    def tell(self, job_id: bytes, waiting: int) -> None:
        """Notify the driver of a job soon; ``waiting`` is the number of waiting requests."""
        job, self._waiting = self.jobs.get(job_id), waiting
        if job is not None and job.driver not in self._soon:
            driver = job.driver
            self._soon.add(driver)
            pause = self._next.get(driver, 0.0) - self.timers.time()
            self.timers.call_later(max(_GATHER, pause), lambda: self._push(driver))

    def _push(self, driver: bytes) -> None:
        self._soon.discard(driver)
        if self.clients.push(driver, "pending"):
            self._next[driver] = self.timers.time() + _EACH * self._waiting

    def _ended(self, process_id: bytes, _how: ProcessExit) -> None:
        self._next.pop(process_id, None)
