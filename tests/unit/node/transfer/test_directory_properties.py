"""Whatever daemons do with values, in whatever order their messages arrive, and whichever of them
die or are given up and come back: a value that was freed is nowhere, and one that a living node has
is found by whoever asks for it.

Daemons are simulated with their directories and stores. Messages of one pair stay in order, those
of different pairs overtake each other, and what the head says comes whenever it comes.
"""

from __future__ import annotations

import collections
import types
from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from stores import new_store

from miniray.node.objects.objects import NodeObjects
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.store.segments import Copies
from miniray.node.transfer.directory import Directory

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.node.store.segments import Key

SIZE = 4096
COUNT = 4
#: Says that messages before it were lost.
GAP = Relayed()
#: (key, nodes that did not serve): a request for a value.
FETCH = "fetch"
#: (key, source, reason): the answer; the source is the node itself if it gives the value.
ANSWER = "answer"
#: The owner of a value is told of it by the node that wrote it.
REPLY = "reply"

picks = st.integers(0, 1 << 16)


class Node:
    """A daemon with one process, which writes and owns values."""

    def __init__(self, world: World, number: int) -> None:
        self.id = b"node000%d" % number
        self.process = b"proc000%d" % number
        self._world = world
        self.alive = True
        self.known: set[bytes] = set()
        self.notices: dict[str, Callable[[bytes, Relayed], object]] = {}
        self.store = new_store(1 << 24)
        self.copies = Copies(self.store, self.knows)
        clients: Any = types.SimpleNamespace(requests={}, notices={}, clients={self.process: None})
        self.directory = Directory(
            self.id,
            self.store,
            self,  # type: ignore[arg-type]
            clients,
            self._free_here,
        )
        spilling = types.SimpleNamespace(waiting=0)
        parts: Any = (spilling, self, None, self.directory, self.copies, clients)
        self.objects = NodeObjects(self.id, *parts)
        freed = self.notices[r.FREED]
        self.notices.update(
            {
                r.FREED: lambda node, message: (
                    freed(node, message),
                    self.reading.pop(message.items, None),
                ),
                FETCH: self._fetch,
                ANSWER: self._answered,
                REPLY: self._told,
            }
        )
        #: What it reads, and the nodes that did not have that.
        self.reading: dict[Key, list[bytes]] = {}
        #: Whom it waits for.
        self.asked: dict[Key, bytes] = {}
        #: The values of its process that that one was told of.
        self.owned: set[Key] = set()

    # --- as the relay ------------------------------------------------------------------
    def knows(self, node: bytes) -> bool:
        return node in self.known

    can_dial = knows

    def send(self, node: bytes, message: Relayed) -> bool:
        if node in self.known:
            self._world.wires[self.id, node].append(message)
        return node in self.known

    # --- values ------------------------------------------------------------------------
    def _free_here(self, key: Key) -> None:
        self.objects.free_here(key)

    def write(self, owner: Node) -> None:
        segment = self.store.create(
            SIZE, 0, owner.process, self.process, home=b"" if owner is self else owner.id
        )
        self.objects.seal(segment.number, "")
        key = (self.id, segment.number, owner.id)
        if owner is self:
            self.owned.add(key)
        else:
            self.send(owner.id, Relayed(notice=REPLY, items=key))

    def _told(self, _node: bytes, message: Relayed) -> None:
        if message.items in self.directory._entries:  # else it came late, and is freed
            self.owned.add(message.items)

    def free(self, key: Key) -> None:
        self.owned.discard(key)
        self.directory.free(key)

    def has(self, key: Key) -> bool:
        number = key[1] if key[0] == self.id else self.copies.find(key)
        if number is None or not self.store.has_number(number):
            return False
        return not self.store.get(number).freed

    def evict(self, key: Key) -> None:
        number = self.copies.find(key)
        if number is not None and self.copies.may_be_evicted(self.store.get(number)):
            self.copies.drop(number)

    # --- reading -----------------------------------------------------------------------
    def read(self, key: Key) -> None:
        if not self.has(key):
            self.reading.setdefault(key, [])
            self._ask(key)

    def _ask(self, key: Key) -> None:
        tried, home = tuple(self.reading[key]), key[2]
        self.asked[key] = home
        if home == self.id:
            self._answered(home, Relayed(items=(key, *self._source(key, self.id, tried))))
        elif not self.send(home, Relayed(notice=FETCH, items=(key, tried))):
            del self.reading[key]

    def _source(self, key: Key, node: bytes, tried: tuple[bytes, ...]) -> tuple[bytes, str]:
        """Where a node is to read a value that the process of this one owns, or why nowhere."""
        try:
            source = self.directory.ask(key, node, tried, small=key[1] % 2 == 0)
        except LookupError as error:
            return b"", str(error)
        if source == self.id and not self.has(key):
            return self._source(key, node, (*tried, source))
        return source, ""

    def _fetch(self, node: bytes, message: Relayed) -> None:
        key, tried = message.items
        if key[2] == self.id:
            source, why = self._source(key, node, tried)
        else:
            source, why = self.id, "" if self.has(key) else "it is not here"
        self.send(node, Relayed(notice=ANSWER, items=(key, source, why)))

    def _answered(self, node: bytes, message: Relayed) -> None:
        key, source, why = message.items
        if key not in self.reading or self.asked.get(key) != node:
            return
        if why and node == key[2]:
            self._end(key)
        elif why:
            self.reading[key].append(node)
            self._ask(key)
        elif source != node:
            self.asked[key] = source
            if not self.send(source, Relayed(notice=FETCH, items=(key, ()))):
                self.reading[key].append(source)
                self._ask(key)
        else:
            del self.reading[key], self.asked[key]
            if not self.has(key):
                segment = self.store.create(SIZE, 0, key[0], self.id)
                self.store.seal(segment.number)
                self.copies.add(key, segment.number)
            if key[2] == self.id:
                self.directory.copied(self.id, [key])
            else:
                self.send(key[2], Relayed(notice=r.COPIED, items=(key,)))

    def _end(self, key: Key) -> None:
        self.reading.pop(key, None)
        self.asked.pop(key, None)

    # --- other nodes -------------------------------------------------------------------
    def hear_of_death(self, node: bytes) -> None:
        self.known.discard(node)
        self._world.wires[self.id, node].clear()
        self.objects.node_died(node)
        self.directory.node_died(node)
        self._ask_owner(node)
        self._ask_again(node)

    def hear_of_return(self, node: bytes) -> None:
        self.known.add(node)
        self.send(node, GAP)

    def messages_lost(self, node: bytes) -> None:
        self.objects.messages_lost(node)
        self._ask_owner(node)
        self._ask_again(node)

    def _ask_owner(self, node: bytes) -> None:
        """Free what the process of this node was not told of."""
        for number in self.directory.written_on(node).get(self.process, ()):
            if (node, number, self.id) not in self.owned:
                self.free((node, number, self.id))

    def _ask_again(self, node: bytes) -> None:
        for key in list(self.reading):
            if key[2] == node and not self.knows(node):
                self._end(key)
            elif self.asked.get(key) == node:
                if node != key[2]:
                    self.reading[key].append(node)
                self._ask(key)

    def receive(self, node: bytes, message: Relayed) -> None:
        self.known.add(node)  # it may have been given up, and have opened another stream
        if message == GAP:
            self.messages_lost(node)
        else:
            self.notices[message.notice](node, message)


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.wires: dict[tuple[bytes, bytes], collections.deque[Relayed]] = collections.defaultdict(
            collections.deque
        )
        self.nodes = {node.id: node for node in (Node(self, number) for number in range(COUNT))}
        for node in self.nodes.values():
            node.known = self.nodes.keys() - {node.id}
        #: What the head has to tell each node of others: (what, node).
        self.news: dict[bytes, collections.deque[tuple[str, bytes]]] = {
            node: collections.deque() for node in self.nodes
        }
        #: Nodes that are cut off, and were given up by the head.
        self.away: set[bytes] = set()
        self.freed: set[Key] = set()

    def living(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    def _node(self, pick: int) -> Node:
        living = self.living()
        return living[pick % len(living)]

    def _value(self, pick: int) -> Key | None:
        owned = [key for node in self.living() for key in sorted(node.owned)]
        return owned[pick % len(owned)] if owned else None

    # --- what happens ------------------------------------------------------------------
    @rule(writer=picks, owner=picks)
    def write(self, writer: int, owner: int) -> None:
        self._node(writer).write(self._node(owner))

    @rule(reader=picks, value=picks)
    def read(self, reader: int, value: int) -> None:
        key = self._value(value)
        if key is not None and self._node(reader).knows(key[2]):
            self._node(reader).read(key)

    @rule(value=picks)
    def free(self, value: int) -> None:
        key = self._value(value)
        if key is not None:
            self.freed.add(key)
            self.nodes[key[2]].free(key)

    @rule(node=picks, value=picks)
    def evict(self, node: int, value: int) -> None:
        key = self._value(value)
        if key is not None:
            self._node(node).evict(key)

    @rule(wire=picks, count=st.integers(1, 5))
    def deliver(self, wire: int, count: int) -> None:
        for _ in range(count):
            open_wires = [ends for ends, queue in self.wires.items() if queue and self._open(*ends)]
            if not open_wires:
                return
            source, target = open_wires[wire % len(open_wires)]
            self.nodes[target].receive(source, self.wires[source, target].popleft())

    def _open(self, source: bytes, target: bytes) -> bool:
        ends = {source, target}
        return all(self.nodes[end].alive for end in ends) and not ends & self.away

    @rule(node=picks)
    def hear(self, node: int) -> None:
        each = self._node(node)
        if self.news[each.id]:
            what, other = self.news[each.id].popleft()
            if what == "died":
                each.hear_of_death(other)
            elif self.nodes[other].alive:
                each.hear_of_return(other)

    @rule(node=picks)
    def kill(self, node: int) -> None:
        each = self._node(node)
        if len(self.living()) > 2:
            each.alive = False
            self.away.discard(each.id)
            self._tell("died", each)

    @rule(node=picks)
    def give_up(self, node: int) -> None:
        each = self._node(node)
        if not self.away:
            self.away.add(each.id)
            self._tell("died", each)

    @rule()
    def come_back(self) -> None:
        for each in self.away:
            self._tell("returned", self.nodes[each])
        self.away.clear()

    def _tell(self, what: str, node: Node) -> None:
        for other in self.living():
            if other is not node:
                self.news[other.id].append((what, node.id))

    # --- what must hold ----------------------------------------------------------------
    def teardown(self) -> None:
        try:
            self.come_back()
            self._settle()
            self._everything_is_found()
            for node in self.living():
                for key in sorted(node.owned):
                    self.freed.add(key)
                    node.free(key)
            self._settle()
            for node in self.living():
                kept = [s for s in node.store if not s.freed]
                assert not kept, f"{kept} on {node.id!r}"
                assert not len(node.copies)
                assert not len(node.directory)
                assert not node.reading
        finally:
            for node in self.nodes.values():
                node.store.close()

    def _settle(self) -> None:
        for pick in range(100_000):
            before = [len(queue) for queue in (*self.wires.values(), *self.news.values())]
            for number in range(COUNT):
                self.hear(number)
            self.deliver(pick, 1)
            if not any(before):
                return
            if not any(q for ends, q in self.wires.items() if self._open(*ends)) and not any(
                self.news[node.id] for node in self.living()
            ):
                return
        raise AssertionError("messages without end")

    def _everything_is_found(self) -> None:
        """Who reads a value that a living node has gets it."""
        for node in self.living():
            for key in sorted(node.owned):
                holders = [other for other in self.living() if other.has(key)]
                for reader in self.living():
                    if not reader.has(key):
                        reader.read(key)
                        self._settle()
                        assert reader.has(key) == bool(holders), (key, reader.id, holders)
                        break


TestDirectory = World.TestCase
TestDirectory.settings = settings(stateful_step_count=60)
