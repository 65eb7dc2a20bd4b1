"""A head without connections: daemons whose messages are made and read by tests."""

from __future__ import annotations

import heapq
import itertools
import marshal
import pickle
import platform
from typing import TYPE_CHECKING, Any

from miniray._proto import common_pb2, head_pb2
from miniray.common.specs import ActorSpec, GrantedLease, LeaseSpec
from miniray.head.cluster import HeadIdentity
from miniray.head.head import Head
from miniray.head.storage import Storage
from miniray.messages import plain
from miniray.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.head.directories.nodes import ClusterNode

_ids = itertools.count(1)


def new_id() -> bytes:
    return next(_ids).to_bytes(8, "big")


class FakeTimers:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._order = itertools.count()
        self._calls: list[tuple[float, int, Callable[[], object]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], object]) -> None:
        heapq.heappush(self._calls, (self.now + delay, next(self._order), callback))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self._calls and self._calls[0][0] <= end:
            self.now, _, callback = heapq.heappop(self._calls)
            callback()
        self.now = end


class FakeDaemon:
    """One session with a head."""

    def __init__(
        self,
        cluster: FakeCluster,
        scalars: dict[str, float],
        devices: dict[str, list[str]] | None = None,
        node_id: bytes | None = None,
        leases: list[head_pb2.RunningLease] | None = None,
        labels: dict[str, str] | None = None,
        **hello: Any,
    ) -> None:
        self.cluster = cluster
        self.node_id = node_id or new_id()
        self.got: list[head_pb2.ToNode] = []
        self.closed = False
        self._requests = itertools.count(1)
        told = {"scalars": scalars, "devices": devices or {}, "labels": labels or {}}
        self.node: ClusterNode | None = cluster.head.join(
            head_pb2.NodeHello(
                **{
                    "node_id": self.node_id,
                    "version": VERSION,
                    "python": platform.python_version(),
                    "host": "10.0.0.1",
                    "address": "machine|/socket|10.0.0.1:7000",
                    "hostname": "box",
                    "resources": plain.dumps(told),
                    "leases": leases or [],
                    **hello,
                }
            ),
            self,
        )

    # --- nodes.NodeOutbox --------------------------------------------------------
    def put(self, message: head_pb2.ToNode) -> None:
        self.got.append(message)

    def close(self) -> None:
        self.closed = True

    # --- reading -----------------------------------------------------------------
    def take(self, kind: str) -> list[Any]:
        """Messages of a kind that came since the last time, in order.

        Leases that are to start are of one kind for tasks, and of another for actors.
        """
        found, rest = [], []
        for message in self.got:
            name = message.WhichOneof("kind")
            told = getattr(message, name)
            if name == "start_lease":
                told = granted(message)
                name = "start_lease" if told.actor_id is None else "start_actor"
            (found if name == kind else rest).append((message, told))
        self.got = [message for message, _ in rest]
        return [told for _, told in found]

    def one(self, kind: str) -> Any:
        found = self.take(kind)
        assert len(found) == 1, f"{len(found)} messages of kind {kind}"
        return found[0]

    def long_waiting(self, process_id: bytes) -> list[dict[str, Any]]:
        """What of a process's job has waited long, or cannot be served."""
        found: list[dict[str, Any]] = self.ask(process_id, "waiting_of_job")
        return found

    def pushes(self, process_id: bytes, topic: str) -> list[tuple[Any, ...]]:
        """Bodies of the pushes about a topic to a process since the last time."""
        found, rest = [], []
        for message in self.got:
            push = message.push
            if (
                message.WhichOneof("kind") == "push"
                and push.process_id == process_id
                and push.topic == topic
            ):
                found.append(marshal.loads(push.body))
            else:
                rest.append(message)
        self.got = rest
        return found

    # --- telling -----------------------------------------------------------------
    def tell(self, **kind: Any) -> None:
        assert self.node is not None
        self.cluster.head.on_message(self.node, head_pb2.FromNode(**kind))

    def driver(self, namespace: str = "tests") -> bytes:
        """A driver attaches; its process id."""
        process_id = new_id()
        details = {"namespace": namespace, "entrypoint": "run.py", "sys_path": [], "cwd": "/"}
        self.tell(
            attached=head_pb2.ProcessAttached(
                process_id=process_id,
                driver=True,
                pid=100,
                job_id=process_id,
                details=plain.dumps(details),
            )
        )
        return process_id

    def worker(self, job_id: bytes) -> bytes:
        process_id = new_id()
        self.tell(attached=head_pb2.ProcessAttached(process_id=process_id, pid=200, job_id=job_id))
        return process_id

    def end_process(self, process_id: bytes, code: int | None = 0, **facts: Any) -> None:
        self.tell(
            ended=head_pb2.ProcessEnded(
                process_id=process_id, exit_code=code or 0, exit_known=code is not None, **facts
            )
        )

    def notice(self, process_id: bytes, method: str, *args: Any) -> None:
        self._ask(process_id, 0, method, args)

    def begin(self, process_id: bytes, method: str, *args: Any) -> int:
        """Ask; the answer may come later."""
        number = next(self._requests)
        self._ask(process_id, number, method, args)
        return number

    def answer(self, process_id: bytes, number: int) -> list[Any]:
        """[result] if the request was answered; raises what it was refused with."""
        for message in self.got:
            reply = message.reply
            if message.WhichOneof("kind") == "reply" and (reply.process_id, reply.request) == (
                process_id,
                number,
            ):
                self.got.remove(message)
                if reply.error:
                    raise pickle.loads(reply.error)
                return [marshal.loads(reply.body)]
        return []

    def ask(self, process_id: bytes, method: str, *args: Any) -> Any:
        (result,) = self.answer(process_id, self.begin(process_id, method, *args))
        return result

    def _ask(self, process_id: bytes, number: int, method: str, args: tuple[Any, ...]) -> None:
        self.tell(
            request=common_pb2.ClientRequest(
                process_id=process_id, request=number, method=method, body=plain.dumps(args)
            )
        )

    def lease_ended(self, number: int) -> None:
        self.tell(lease_ended=head_pb2.LeaseEnded(lease=number))


class FakeCluster:
    """A head and what its clock is."""

    def __init__(self, storage: Storage | None = None, epoch: int = 1) -> None:
        self.timers = FakeTimers()
        self.head = Head(HeadIdentity("test", epoch, "here"), self.timers, storage or Storage())

    def node(
        self,
        scalars: dict[str, float] | None = None,
        devices: dict[str, list[str]] | None = None,
        **facts: Any,
    ) -> FakeDaemon:
        return FakeDaemon(self, scalars or {"CPU": 4}, devices, **facts)


def actor_spec(**changes: Any) -> tuple[Any, ...]:
    """A spec as client/actor_clients.py sends it."""
    fields = {
        "class_key": b"k" * 16,
        "class_name": "Thing",
        "info": b"info",
        "method_groups": {},
        "resources": {},
        "placement_resources": {"CPU": 1},
        "namespace": "tests",
        "detached": False,
        "is_async": False,
        "owner_node": b"n" * 8,
    }
    return ActorSpec(**fields | changes).to_wire()


def task_spec(**changes: Any) -> tuple[Any, ...]:
    """A spec as calls/task_client.py sends it."""
    fields = {"resources": {"CPU": 1}, "max_calls": 0, "name": "work"}
    return LeaseSpec(**fields | changes).to_wire()


def granted(message: head_pb2.ToNode) -> GrantedLease:
    return GrantedLease.from_wire(plain.loads(message.start_lease.granted))


def report(start: GrantedLease, process_id: bytes = b"") -> head_pb2.RunningLease:
    """What the daemon that was told to start a lease tells a new head of it."""
    return head_pb2.RunningLease(
        lease=start.number,
        epoch=start.epoch,
        process_id=process_id,
        owner=start.owner,
        actor_id=start.actor_id,
        allocation=plain.dumps(tuple(start.allocation)),
    )
