"""Daemons, clients and a disk that exist as messages only: the parts of ``cluster_model.py``."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import marshal
import platform
from typing import TYPE_CHECKING, Any

from head_harness import FakeTimers, granted, report

from miniray._proto import common_pb2, head_pb2
from miniray.common.state_types import DEAD
from miniray.head import storage as records
from miniray.head.storage import Saved
from miniray.messages import plain
from miniray.node.base.head_client import Unconfirmed
from miniray.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster_model import World

    from miniray.common.specs import GrantedLease

GPUS = ["0", "1", "2"]


class Clock(FakeTimers):
    """It goes on between two calls, as any clock does."""

    def call_later(self, delay: float, callback: Callable[[], object]) -> None:
        super().call_later(max(delay, 1e-3), callback)


class Disk:
    """What a head tells its storage: written in order, some time later. A ``Storage``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.epoch = 0
        self._kept: dict[tuple[str, Any], Any] = {}
        #: Changes that are written together.
        self._unwritten: list[dict[tuple[str, bytes], bytes | None]] = []

    def actor(self, actor: Any) -> None:
        if actor.state == DEAD:
            dead = records.dead_actor_record(actor)
            self._change({("dead", actor.id): dead, ("actor", actor.id): None})
        else:
            self._change({("actor", actor.id): records.actor_record(actor)})

    def placement_group(self, group: Any) -> None:
        if group.removed or group.state is None:
            self._change({("removed", group.id): group.id, ("group", group.id): None})
        else:
            self._change({("group", group.id): records.group_record(group)})

    def job(self, job: Any) -> None:
        self._change({("job", job.id): records.job_record(job)})

    def job_forgotten(self, job_id: bytes) -> None:
        self._change({("job", job_id): None})

    def key_value(self, namespace: str, key: Any, value: bytes | None) -> None:
        place = marshal.dumps((namespace, key), 0)
        record = None if value is None else marshal.dumps((namespace, key, value))
        self._change({("value", place): record})

    def event(self, number: int, record: bytes | None) -> None:
        """Events are for people."""

    def _change(self, changes: dict[tuple[str, bytes], bytes | None]) -> None:
        self._unwritten.append(changes)
        for (kind, id), record in changes.items():
            self._world.told.update(b"%s %s %d" % (kind.encode(), id, record is None))

    def write(self, count: int | None = None) -> None:
        """Write so many of the changes that wait; None: all."""
        now = self._unwritten[:count]
        del self._unwritten[: len(now)]
        for key, record in itertools.chain.from_iterable(each.items() for each in now):
            if record is None:
                self._kept.pop(key, None)
            else:
                self._kept[key] = record

    def restart(self, written: int) -> Saved:
        """The head was killed when only so many of the last changes were written."""
        self.write(written)
        self._unwritten.clear()
        self.epoch += 1
        kept: dict[str, list[Any]] = collections.defaultdict(list)
        for (kind, _), record in self._kept.items():
            kept[kind].append(record)
        return Saved(
            "test",
            self.epoch,
            kept["actor"],
            kept["group"],
            kept["job"],
            [marshal.loads(record) for record in kept["value"]],
            kept["dead"],
            kept["removed"],
        )

    def knows(self, actor_id: bytes, lease: int) -> bool:
        """Whether any head to come finds that an actor has a lease, or that it is dead.

        It is written, and what waits to be written gives the actor no other one.
        """
        key = ("actor", actor_id)
        waiting = [changes.get(key) for changes in self._unwritten]
        found = [self._kept.get(key), *(record for record in waiting if record is not None)]
        return all(
            record is not None and records.read_actor(record)[0].lease == lease for record in found
        )

    def has_ended(self, id: bytes) -> bool:
        """Whether it is written that an actor is dead or a group removed."""
        return ("dead", id) in self._kept or ("removed", id) in self._kept

    @property
    def unwritten(self) -> int:
        return len(self._unwritten)


@dataclasses.dataclass(eq=False)
class Process:
    """A driver or worker: what it made, holds, and waits for."""

    id: bytes
    daemon: Daemon
    job_id: bytes
    is_driver: bool
    actors: list[bytes] = dataclasses.field(default_factory=list)
    groups: list[tuple[bytes, int]] = dataclasses.field(default_factory=list)
    #: Per shape: how many tasks wait, and the leases had.
    waiting: dict[int, int] = dataclasses.field(default_factory=dict)
    specs: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    held: dict[int, tuple[int, bytes]] = dataclasses.field(default_factory=dict)

    def ask(self, method: str, *args: Any, number: int = 0) -> None:
        self.daemon.ask(self.id, number, method, args)

    def on_push(self, topic: str, body: tuple[Any, ...]) -> None:
        if topic == "lease_granted":
            group, number, _node, process_id, _limit = body
            if self.waiting.get(group, 0) > 0:
                self.waiting[group] -= 1
                self.held[number] = (group, process_id)
                if not self.daemon.world.runs(process_id):
                    self.give_back(number, broken=True)
            else:
                self.ask("return_lease", number)
        elif topic == "lease_revoked" and body[0] in self.held:
            self.give_back(body[0])
        elif topic == "lease_failed":
            self.waiting[body[0]] = 0

    def want(self, group: int, spec: dict[str, Any], tasks: int) -> None:
        self.waiting[group], self.specs[group] = tasks, spec
        had = sum(1 for its_group, _ in self.held.values() if its_group == group)
        self.ask("want_leases", group, spec, had + tasks)

    def give_back(self, number: int, *, broken: bool = False) -> None:
        group, _ = self.held.pop(number)
        if broken:
            self.ask("return_lease", number, True)
        else:
            self.ask("return_lease", number)
        if self.waiting.get(group):
            self.want(group, self.specs[group], self.waiting[group])

    def head_back(self) -> None:
        self.ask("hold_leases", list(self.held))
        for group, tasks in self.waiting.items():
            if tasks:
                self.ask("want_leases", group, self.specs[group], tasks)


@dataclasses.dataclass(eq=False)
class Running:
    """A lease as its daemon knows it."""

    number: int
    start: GrantedLease
    actor_id: bytes
    process: Process | None = None
    alive: bool = False
    ending: bool = False

    @property
    def held(self) -> list[tuple[str, int]]:
        """(device, units)"""
        return [held for _, shares in self.start.allocation.devices for held in shares]


class Daemon:
    """A node."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.id = world.new_id()
        self.node: Any = None
        self.session: Session | None = None
        self.leases: dict[int, Running] = {}
        self.processes: dict[bytes, Process] = {}
        #: To be sent; on their way to the head; on their way from it.
        self.queue: collections.deque[head_pb2.FromNode] = collections.deque()
        self.up: collections.deque[head_pb2.FromNode] = collections.deque()
        self.down: collections.deque[head_pb2.ToNode] = collections.deque()
        self.lost_at: float | None = None
        self.requests = Unconfirmed(
            lambda: world.timers.now if self.lost_at is None else self.lost_at
        )
        #: Actors that ended themselves.
        self.exited: set[bytes] = set()

    # --- sessions ----------------------------------------------------------------
    def join(self) -> None:
        again = self.world.was_here(self)
        if self.world.head.recovery.over:
            self.given_up()
        self.session = Session(self)
        self.down.clear()
        self.up.clear()
        self.node = self.world.head.join(
            head_pb2.NodeHello(
                node_id=self.id,
                version=VERSION,
                python=platform.python_version(),
                host="10.0.0.1",
                address="machine|/socket|10.0.0.1:7000",
                resources=plain.dumps({"scalars": {"CPU": 8}, "devices": {"GPU": GPUS}}),
                leases=[
                    report(each.start, each.process.id if each.process is not None else b"")
                    for each in self.leases.values()
                ],
                lately=head_pb2.FromNodeBatch(messages=self.requests.reports()),
            ),
            self.session,
        )
        assert self.node is not None, self.down
        self.lost_at = None
        if not again:
            return
        waiting = list(self.queue)
        first = [self._report(each) for each in self.leases.values() if each.alive]
        first += [_attached(process) for process in self.processes.values()]
        self.queue = collections.deque([*first, *self.requests.to_repeat(waiting), *waiting])
        for process in self.processes.values():
            process.head_back()

    def given_up(self) -> None:
        """What the head had not heard from this node it will not believe any more."""
        self.world.exited -= self.exited
        self.exited.clear()

    def lose_session(self) -> None:
        self.node = None
        self.up.clear()
        self.down.clear()
        if self.lost_at is None:
            self.lost_at = self.world.timers.now

    def send(self, **kind: Any) -> None:
        self.queue.append(head_pb2.FromNode(**kind))

    def ask(self, process_id: bytes, number: int, method: str, args: tuple[Any, ...]) -> None:
        message = head_pb2.FromNode(
            request=common_pb2.ClientRequest(
                process_id=process_id, request=number, method=method, body=plain.dumps(args)
            )
        )
        self.requests.sent(message)
        self.queue.append(message)

    def deliver_up(self, count: int) -> None:
        self.up.extend(self.queue)
        self.queue.clear()
        for _ in range(min(count, len(self.up))):
            if self.node is None or not self.node.alive:
                return
            self.world.head.on_message(self.node, self.up.popleft())

    def deliver_down(self, count: int) -> None:
        for _ in range(min(count, len(self.down))):
            self.handle(self.down.popleft())

    # --- what the head says ------------------------------------------------------
    def handle(self, message: head_pb2.ToNode) -> None:
        kind = message.WhichOneof("kind")
        assert kind != "stop", message
        if kind == "start_lease":
            self._start(granted(message))
        elif kind == "end_lease":
            lease = self.leases.get(message.end_lease.lease)
            if lease is not None:
                lease.ending = True
        elif kind == "reply":
            self.requests.answered(message.reply.process_id, message.reply.request)
            self.world.answered(message.reply.request)
        elif kind == "push":
            process = self.processes.get(message.push.process_id)
            if process is not None:
                process.on_push(message.push.topic, marshal.loads(message.push.body))

    def _start(self, start: GrantedLease) -> None:
        assert start.number not in self.leases
        self.leases[start.number] = Running(start.number, start, start.actor_id or b"")
        self.check()

    def check(self) -> None:
        """No device has more than it can hold."""
        used: collections.Counter[str] = collections.Counter()
        for lease in self.leases.values():
            used.update(dict(lease.held))
        assert all(units <= 10_000 for units in used.values()), used

    # --- what happens to workers -------------------------------------------------
    def attach(self, job_id: bytes | None = None) -> Process:
        id = self.world.new_id()
        process = Process(id, self, job_id or id, job_id is None)
        self.processes[id] = process
        self.queue.append(_attached(process))
        return process

    def ready(self, lease: Running) -> None:
        lease.process = self.attach(lease.start.job_id)
        if lease.actor_id:
            lease.alive = True
            self.queue.append(self._report(lease))
        elif not lease.ending:
            self.send(
                lease_started=head_pb2.LeaseStarted(lease=lease.number, process_id=lease.process.id)
            )

    def _report(self, lease: Running, **facts: Any) -> head_pb2.FromNode:
        assert lease.process is not None
        return head_pb2.FromNode(
            actor=head_pb2.ActorReported(
                actor_id=lease.actor_id, lease=lease.number, process_id=lease.process.id, **facts
            )
        )

    def report(self, message: head_pb2.FromNode) -> None:
        self.requests.reported(message)
        self.queue.append(message)

    def fail_to_start(self, lease: Running) -> None:
        del self.leases[lease.number]
        self.send(lease_failed=head_pb2.LeaseFailed(lease=lease.number, error=b"", tries=20))

    def end(self, lease: Running, code: int | None) -> None:
        """The process of a lease is gone, if it had one; so is the lease."""
        del self.leases[lease.number]
        if lease.process is not None:
            self.process_ended(lease.process, code, lease.number)
        self.send(lease_ended=head_pb2.LeaseEnded(lease=lease.number))

    def process_ended(self, process: Process, code: int | None, lease: int = 0) -> None:
        del self.processes[process.id]
        self.requests.process_ended(process.id)
        ended = head_pb2.ProcessEnded(
            process_id=process.id,
            exit_code=code or 0,
            exit_known=code is not None,
            planned=code == 0,
            lease=lease,
        )
        self.report(head_pb2.FromNode(ended=ended))
        self.world.process_gone(process.id)


class Session:
    """The head's end of one session: what it says when that is over goes nowhere."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def put(self, message: head_pb2.ToNode) -> None:
        is_start = message.WhichOneof("kind") == "start_lease"
        started = granted(message).actor_id if is_start else None
        world = self._daemon.world
        if started is not None and started in world.exited and not world.head.recovery.over:
            world.wrong.append(f"actor {started.hex()} is to start again")
        world.told.update(self._daemon.id + message.SerializeToString())
        if self._daemon.session is self:
            self._daemon.down.append(message)

    def close(self) -> None:
        """Nothing comes after this."""


def _attached(process: Process) -> head_pb2.FromNode:
    message = head_pb2.ProcessAttached(process_id=process.id, pid=1, job_id=process.job_id)
    if process.is_driver:
        message.driver = True
        message.details = plain.dumps({"namespace": "tests"})
    return head_pb2.FromNode(attached=message)
