"""A task client, and a head that grants when it is told to."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from process_doubles import NODE, Caller, FakePeer, packed

from miniray.calls.task_client import TaskClient
from miniray.common.specs import LeaseSpec
from miniray.messages import protocol as p

if TYPE_CHECKING:
    from miniray.calls.call import Call
    from miniray.calls.task_groups import TaskGroup


class TaskWorld:
    """A task client, and a head that grants when it is told to."""

    def __init__(self) -> None:
        self.me = Caller()
        self.link = self.me.link
        self.told: list[str] = []
        self.client = TaskClient(
            self.me.calls,
            self.me.peers,
            self.link,
            self.me.loop,  # type: ignore[arg-type]
            self.told.append,
            lambda: self.now,
        )
        self.now = 100.0
        self.leases = 0

    def group(self, key: str = "cpu", max_calls: int = 0, **resources: float) -> TaskGroup:
        spec = LeaseSpec(name="", resources=resources or {"CPU": 1}, max_calls=max_calls)
        return self.client.group(key, lambda: spec)

    def call(self, *args: Any, group: TaskGroup | None = None, **how: Any) -> Call:
        name = how.pop("name", None)
        call = self.me.call(self.client, *args, options=group or self.group(), **how)
        call.name = name or call.name
        self.me.calls.submit(call)
        return call

    def grant(self, group: TaskGroup | None = None, node: bytes = NODE) -> FakePeer:
        self.leases += 1
        process = b"worker%02d" % self.leases
        group = group or self.group()
        limit = group.spec.max_calls or 0
        self.client.on_granted(group.id, self.leases, node, process, limit)
        return self.me.peers.get(node, process)

    def reply(self, peer: FakePeer, call: Call, seconds: float = 0.05) -> None:
        """As the runtime hands a reply on."""
        self.me.answer(peer, call, p.STATUS_OK, (packed("done"),), seconds=seconds)

    def fail(self, peer: FakePeer, call: Call, error: BaseException) -> None:
        self.me.fails(peer, call, error)

    def lose(self, peer: FakePeer) -> None:
        peer.lost = True
        self.client.on_peer_lost(peer)  # type: ignore[arg-type]

    def recall(self, peer: FakePeer, *calls: Call) -> None:
        message = (p.PEER_RECALLED, [call.number for call in calls])
        self.client.on_recalled(peer, message)  # type: ignore[arg-type]

    def fast(self) -> None:
        """Let tasks be so short that many go down one lease."""
        self.group().duration = 0.0001

    def stored(self, node: bytes, size: int) -> Any:
        """A ref of a value in the memory of a node."""
        value = (p.VALUE_SHARED, (node, self.me.calls.next_number(), node, size), ())
        return self.me.table.create_with_value(self.me.table.new_id(), value, None)

    @property
    def wanted(self) -> list[int]:
        return [wanted for _, _, wanted, _ in self.link.head_heard("want_leases")]

    @property
    def asked_near(self) -> list[bytes]:
        return [near for *_, near in self.link.head_heard("want_leases")]

    @property
    def returned(self) -> list[int]:
        return [notice[0] for notice in self.link.head_heard("return_lease")]

    def error_of(self, call: Call) -> BaseException | None:
        value = self.me.result_of(call)
        if value is None or value[0] != p.VALUE_ERROR:
            return None
        error: BaseException = pickle.loads(value[1])
        return error
