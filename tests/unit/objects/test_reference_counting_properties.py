"""Whatever processes do with refs, in whatever order their messages arrive: an object
exists at its owner for as long as anybody holds a ref of it, and no longer.

Processes are simulated: each has its own table and borrowing, and messages of one
pair of processes stay in order, while those of different pairs overtake each other.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kept import kept

from miniray.common.object_ref import ObjectRef, hooks, new_id, owner_of
from miniray.messages import protocol as p
from miniray.objects.borrowing import Borrowing
from miniray.objects.objects import ObjectTable

if TYPE_CHECKING:
    from collections.abc import Callable

NODE = b"node0000"
COUNT = 3
CALL, REPLY = 1, 2

picks = st.integers(0, 1 << 16)


class Wire:
    """One process's way to another; messages stay in order."""

    direct = True
    lost = False

    def __init__(self, source: Process, target: Process) -> None:
        self.process_id = target.process_id
        self.node_id = NODE
        self.source = source
        self.target = target
        self.queue: collections.deque[tuple[Any, ...]] = collections.deque()

    def send(self, message: tuple[Any, ...]) -> None:
        self.queue.append(message)


class Process:
    """What a driver or worker does with refs, without values, sockets or threads."""

    def __init__(self) -> None:
        self.process_id = new_id()
        self.table = ObjectTable(self.process_id, NODE, self)
        self.borrowing = Borrowing(self.table, self, lambda _id, _payload: "it is not made again")  # type: ignore[arg-type]
        self.wires: dict[bytes, Wire] = {}
        self.handlers = {
            p.PEER_BORROW: self.borrowing.on_borrow,
            p.PEER_ACK: self.borrowing.on_ack,
            p.PEER_UNBORROW: self.borrowing.on_unborrow,
            p.PEER_WANT: self.borrowing.on_want,
            p.PEER_VALUE: self.borrowing.on_value,
            p.PEER_RELEASE: self.on_release,
            CALL: self.on_call,
            REPLY: self.on_reply,
        }
        #: What the user's code holds.
        self.refs: list[ObjectRef[Any]] = []
        #: Calls made: number → the refs that their arguments hold.
        self.calls: dict[int, list[ObjectRef[Any]]] = {}
        #: Calls that run here: (caller, number) → the refs of their arguments.
        self.running: dict[tuple[bytes, int], list[ObjectRef[Any]]] = {}
        #: Refs in results on their way.
        self.results: dict[tuple[bytes, int], list[ObjectRef[Any]]] = {}
        self.numbers = iter(range(1, 1 << 30))
        #: Refs that went away and were not counted yet.
        self.dropped: list[bytes] = []

    # --- what the table and the borrowing need ------------------------------------------
    def get(self, _node: bytes, process_id: bytes) -> Wire:
        return self.wires[process_id]

    def send_surely(self, node: bytes, process_id: bytes, message: tuple[Any, ...]) -> None:
        self.get(node, process_id).send(message)

    def free_shared(self, value: Any) -> None:
        pass

    def unborrow(self, id: bytes, owner_node: bytes) -> None:
        self.borrowing.unborrow(id, owner_node)

    def actor_unreferenced(self, id: bytes) -> None:
        raise AssertionError

    # --- what programs do -----------------------------------------------------------
    def put(self, contained: list[ObjectRef[Any]]) -> None:
        value = (p.VALUE_PICKLE, b"", tuple((ref.binary(), NODE) for ref in contained))
        self.refs.append(
            self.table.create_with_value(self.table.new_id(), value, contained or None)
        )

    def load(self, ref: ObjectRef[Any]) -> bool:
        """Unpickle a value: the refs inside it become the user's; False if it is not here."""
        entry = self.table.entry(ref.binary())
        assert entry is not None
        if entry.value is None:
            return False
        assert entry.value[0] != p.VALUE_ERROR, "the owner had freed an object that is in use"
        for id, node in entry.value[2]:
            self.refs.append(self.rebuild(id, node))
        return True

    def rebuild(self, id: bytes, node: bytes) -> ObjectRef[Any]:
        if self.table.entry(id) is None:
            return self.borrowing.hold(((id, node),))[0]
        return self.table.adopt(id, node)[0]

    def call(self, other: Process, refs: list[ObjectRef[Any]]) -> None:
        number = next(self.numbers)
        self.calls[number] = refs
        self.wires[other.process_id].send((CALL, number, [ref.binary() for ref in refs]))

    def on_call(self, peer: Wire, message: tuple[Any, ...]) -> None:
        _, number, ids = message
        self.running[(peer.process_id, number)] = [self.table.adopt(id, NODE)[0] for id in ids]

    def finish(self, key: tuple[bytes, int], returned: list[ObjectRef[Any]]) -> None:
        peer = self.wires[key[0]]
        if returned:
            self.results[key] = returned
        held = self.running.pop(key)
        self.drain()
        kept = self.borrowing.keep_of(held)
        reply = (REPLY, key[1], kept, [ref.binary() for ref in returned])
        self.borrowing.defer(lambda: peer.send(reply))

    def on_reply(self, peer: Wire, message: tuple[Any, ...]) -> None:
        _, number, kept, returned = message
        self.borrowing.report_for(peer, kept)  # type: ignore[arg-type]
        if returned:
            self.put(self.borrowing.hold([(id, NODE) for id in returned]))
            self.borrowing.defer(lambda: peer.send((p.PEER_RELEASE, [number])))
        del self.calls[number]

    def on_release(self, peer: Wire, message: tuple[Any, ...]) -> None:
        for number in message[1]:
            del self.results[(peer.process_id, number)]

    # --- steps ---------------------------------------------------------------------
    def settle(self) -> None:
        """What went away in a step waits to be counted."""
        while hooks.dropped:
            id = hooks.dropped.popleft()
            if owner_of(id) == self.process_id or owner_of(id) in self.wires:
                self.dropped.append(id)  # others are of worlds that are collected only now

    def drain(self) -> None:
        self.settle()
        while self.dropped:
            batch, self.dropped = self.dropped, []
            self.table.drop(batch)
            self.settle()

    def held(self) -> set[bytes]:
        """The ids of the refs that programs, calls and results hold here."""
        groups = [self.refs, *self.calls.values(), *self.running.values(), *self.results.values()]
        return {ref.binary() for group in groups for ref in group}

    def inside(self, reachable: set[bytes]) -> set[bytes]:
        """The ids of refs in the values, known here, of objects that somebody can reach."""
        entries = [entry for entry in self.table.snapshot() if entry.id in reachable]
        return {ref.binary() for entry in entries for ref in entry.contained or ()}


def _choose(refs: list[ObjectRef[Any]], items: list[int]) -> list[ObjectRef[Any]]:
    return [refs[item % len(refs)] for item in items if refs]


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        hooks.dropped.clear()
        self.processes = [Process() for _ in range(COUNT)]
        self.wires: list[Wire] = []
        for source in self.processes:
            for target in self.processes:
                if source is not target:
                    wire = Wire(source, target)
                    source.wires[target.process_id] = wire
                    self.wires.append(wire)
        self.by_id = {process.process_id: process for process in self.processes}

    @rule(kind=picks, which=picks, items=st.lists(picks, min_size=3, max_size=3))
    def step(self, kind: int, which: int, items: list[int]) -> None:
        """Something that can happen now; a step that finds nothing to do would be wasted."""
        possible = {name: found for name, find in self._finders() if (found := find())}
        name = list(possible)[kind % len(possible)]
        subject = possible[name][which % len(possible[name])]
        getattr(self, f"_{name}")(subject, items)
        actor = subject[0] if isinstance(subject, tuple) else subject
        if isinstance(actor, Process):
            actor.settle()

    def _finders(self) -> list[tuple[str, Callable[[], list[Any]]]]:
        every = self.processes
        return [
            ("put", lambda: [one for one in every if len(one.refs) < 3]),
            ("drop", lambda: [one for one in every if one.refs]),
            ("drain", lambda: [one for one in every if one.dropped]),
            ("call", lambda: [one for one in every if one.refs and len(one.calls) < 3]),
            ("keep", lambda: [(one, key) for one in every for key in one.running]),
            ("get", lambda: [one for one in every if one.refs or one.running]),
            ("finish", lambda: [(one, key) for one in every for key in one.running]),
            ("deliver", lambda: [wire for wire in self.wires if wire.queue]),
            ("deliver_all", lambda: [wire for wire in self.wires if wire.queue]),
        ]

    def _put(self, process: Process, items: list[int]) -> None:
        process.put(_choose(process.refs, items[: items[0] % 3]))

    def _drop(self, process: Process, items: list[int]) -> None:
        if items[1] % 4 == 0:
            process.refs.clear()
        else:
            del process.refs[items[0] % len(process.refs)]

    def _drain(self, process: Process, _items: list[int]) -> None:
        process.drain()

    def _call(self, process: Process, items: list[int]) -> None:
        others = [other for other in self.processes if other is not process]
        chosen = _choose(process.refs, items[: 1 + items[1] % 2])
        process.call(others[items[2] % len(others)], chosen)

    def _keep(self, subject: tuple[Process, tuple[bytes, int]], items: list[int]) -> None:
        process, key = subject
        refs = process.running[key]
        process.refs.append(process.rebuild(refs[items[0] % len(refs)].binary(), NODE))

    def _get(self, process: Process, items: list[int]) -> None:
        refs = [*process.refs, *(ref for refs in process.running.values() for ref in refs)]
        ref = refs[items[0] % len(refs)]
        if not process.load(ref):
            entry = process.table.entry(ref.binary())
            assert entry is not None
            process.borrowing.want([entry])

    def _finish(self, subject: tuple[Process, tuple[bytes, int]], items: list[int]) -> None:
        process, key = subject
        process.finish(key, _choose(process.refs, items[: items[0] % 3]))

    def _deliver_all(self, wire: Wire, _items: list[int]) -> None:
        while wire.queue:
            self._deliver(wire)

    def _deliver(self, wire: Wire, _items: object = None) -> None:
        message = wire.queue.popleft()
        target = wire.target
        target.handlers[message[0]](target.wires[wire.source.process_id], message)  # type: ignore[arg-type]
        target.settle()

    def reachable(self) -> set[bytes]:
        """The ids of all objects that a program can still come by."""
        found: set[bytes] = set()
        more = set().union(*(process.held() for process in self.processes))
        while more - found:
            found |= more
            more = set()
            for process in self.processes:
                own = {id for id in found if owner_of(id) == process.process_id}
                more |= process.inside(own | process.held())
        return found

    @invariant()
    def what_is_held_exists_at_its_owner(self) -> None:
        for id in self.reachable():
            owner = self.by_id[owner_of(id)]
            assert owner.table.entry(id) is not None, "an object is gone that is in use"

    def settle_everything(self) -> None:
        while True:
            for process in self.processes:
                process.drain()
            waiting = [wire for wire in self.wires if wire.queue]
            if not waiting:
                return
            self._deliver(waiting[0])

    def teardown(self) -> None:
        self.settle_everything()
        self.what_is_held_exists_at_its_owner()
        reachable = self.reachable()
        for process in self.processes:
            alive = {entry.id for entry in process.table.snapshot()}
            assert alive <= reachable, "an object is kept that nobody holds"
        for process in self.processes:
            for key in list(process.running):
                process.finish(key, [])
                process.settle()
        self.settle_everything()
        for process in self.processes:
            process.refs.clear()
            process.settle()
        self.settle_everything()
        for process in self.processes:
            assert len(process.table) == 0
            assert not kept(process.table, process.borrowing)
            assert not process.calls
            assert not process.results


TestReferenceCounting = World.TestCase
TestReferenceCounting.settings = settings(stateful_step_count=60)
