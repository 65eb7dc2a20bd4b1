"""Copies of values whose node is gone, between doubles of owners, adopted values and daemons."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from miniray.node.objects.left_copies import LeftCopies
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed

if TYPE_CHECKING:
    from miniray.node.objects.objects import Left

NODE, FAR, GONE, OFF = b"node-one", b"node-two", b"node-was", b"node-off"
OWNER, ENDED = b"owner000", b"owner-no"


class Clients:
    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.pushed: list[tuple[bytes, str, tuple[Any, ...]]] = []

    def push(self, process: bytes, topic: str, body: tuple[Any, ...]) -> None:
        self.pushed.append((process, topic, body))


class Relay:
    def __init__(self) -> None:
        self.notices: dict[str, Any] = {}
        self.others = [FAR]
        self.sent: list[tuple[bytes, Relayed]] = []

    def nodes(self) -> list[bytes]:
        return self.others

    def knows(self, node: bytes) -> bool:
        return node in self.others

    def send(self, node: bytes, message: Relayed) -> bool:
        self.sent.append((node, message))
        return node != OFF


class Objects:
    def __init__(self) -> None:
        self.left: dict[bytes, list[Left]] = {}
        self.freed: list[tuple[bytes, int]] = []
        self.given: list[tuple[int, bytes, bytes]] = []

    def node_died(self, _node: bytes) -> dict[bytes, list[Left]]:
        return self.left

    def free(self, node: bytes, number: int) -> None:
        self.freed.append((node, number))

    def give(self, number: int, owner: bytes, node: bytes) -> None:
        self.given.append((number, owner, node))


class Adopted:
    def __init__(self) -> None:
        self.values: set[tuple[bytes, int]] = set()

    def moved(self, old: tuple[bytes, int], _new: tuple[bytes, int]) -> bool:
        if old in self.values:
            self.values.remove(old)
            return True
        return False


class Node:
    def __init__(self) -> None:
        self.clients, self.relay = Clients(), Relay()
        self.objects, self.adopted = Objects(), Adopted()
        parts: Any = (self.clients, self.relay, self.objects, self.adopted)
        self.left = LeftCopies(NODE, *parts, lambda process: process == OWNER)

    def hear(self, kind: str, *items: Any, sender: bytes = FAR) -> None:
        self.relay.notices[kind](sender, Relayed(notice=kind, items=items))


def test_a_daemon_tells_that_of_the_owner_what_it_has() -> None:
    node = Node()
    node.objects.left = {FAR: [(7, 1, OWNER), (8, 2, OWNER)]}
    node.left.node_died(GONE)
    assert node.relay.sent == [
        (FAR, Relayed(notice=r.LEFT, items=(GONE, (7, 1, OWNER), (8, 2, OWNER))))
    ]


def test_an_owner_that_lives_gets_the_copy() -> None:
    node = Node()
    node.hear(r.LEFT, GONE, (7, 1, OWNER), (8, 2, OWNER))
    owned = [(FAR, Relayed(notice=r.OWNED, items=(number, OWNER))) for number in (1, 2)]
    assert node.relay.sent == owned
    assert node.clients.pushed == [(OWNER, "left_copies", (GONE, FAR, [(7, 1), (8, 2)]))]
    assert not node.objects.freed


def test_an_owner_of_the_same_node_gets_the_copy() -> None:
    node = Node()
    node.objects.left = {NODE: [(7, 1, OWNER)]}
    node.left.node_died(GONE)
    assert node.objects.given == [(1, OWNER, NODE)]
    assert node.clients.pushed == [(OWNER, "left_copies", (GONE, NODE, [(7, 1)]))]


def test_a_copy_that_is_given_to_a_process_has_it_as_its_owner() -> None:
    node = Node()
    node.hear(r.OWNED, 1, OWNER)
    assert node.objects.given == [(1, OWNER, FAR)]


def test_the_daemon_keeps_one_copy_of_what_an_owner_left_to_it() -> None:
    node = Node()
    node.adopted.values = {(GONE, 7)}
    node.hear(r.LEFT, GONE, (7, 1, ENDED))
    assert not node.objects.freed
    node.hear(r.LEFT, GONE, (7, 5, ENDED))
    assert node.objects.freed == [(FAR, 5)]


def test_a_copy_whose_owner_was_killed_is_freed() -> None:
    node = Node()
    node.hear(r.LEFT, GONE, (7, 1, ENDED))
    assert node.objects.freed == [(FAR, 1)]
    assert not node.clients.pushed


async def settling(node: Node, gone: bytes = GONE) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(node.clients.requests["left_copies"](None, gone))
    await asyncio.sleep(0)
    return task


def asked(node: Node) -> list[tuple[bytes, int]]:
    sent = node.relay.sent
    return [(to, message.items[0]) for to, message in sent if message.notice == r.LEFT_ASKED]


def test_it_is_over_when_every_node_has_told() -> None:
    async def test() -> None:
        node = Node()
        node.relay.others = [FAR, OFF, b"node-new"]
        task = await settling(node)
        [(_, number), *_] = asked(node)
        node.hear(r.LEFT_TOLD, number)
        node.left.node_died(b"node-new")
        assert await asyncio.wait_for(task, 10) == (True, -1)
        before = len(node.relay.sent)
        assert await asyncio.wait_for(await settling(node), 10) == (True, -1)
        assert len(node.relay.sent) == before  # nobody is asked twice

    asyncio.run(test())


def test_a_node_out_of_reach_is_not_waited_for() -> None:
    async def test() -> None:
        node = Node()
        task = await settling(node)
        node.left.node_unreachable(FAR)
        assert await asyncio.wait_for(task, 10) == (True, -1)

    asyncio.run(test())


def test_of_a_node_that_lives_only_that_node_is_asked() -> None:
    async def test() -> None:
        node = Node()
        node.relay.others = [FAR, b"node-new"]
        task = await settling(node, FAR)
        [(to, number)] = asked(node)
        assert to == FAR
        node.hear(r.LEFT_TOLD, number)
        assert await asyncio.wait_for(task, 10) == (False, -1)
        assert await asyncio.wait_for(await settling(node, NODE), 10) == (False, -1)
        assert len(node.relay.sent) == 1

    asyncio.run(test())


def test_who_asks_of_a_node_whose_death_is_not_known_here_yet_waits_for_it() -> None:
    async def test() -> None:
        node = Node()
        node.relay.others = [FAR, GONE]
        task = await settling(node)
        assert [to for to, _ in asked(node)] == [GONE]
        node.relay.others = [FAR]
        node.left.node_died(GONE)
        for _ in range(3):
            await asyncio.sleep(0)
        [_, (to, number)] = asked(node)
        assert to == FAR
        node.hear(r.LEFT_TOLD, number)
        assert await asyncio.wait_for(task, 10) == (True, -1)

    asyncio.run(test())


def test_a_node_says_of_itself_that_it_lives() -> None:
    node = Node()
    node.hear(r.LEFT_ASKED, 3, NODE)
    assert node.relay.sent == [(FAR, Relayed(notice=r.LEFT_TOLD, items=(3,)))]


def test_who_has_not_heard_of_the_death_answers_when_it_has() -> None:
    node = Node()
    node.relay.others = [FAR, GONE]
    node.hear(r.LEFT_ASKED, 3, GONE)
    assert not node.relay.sent
    node.relay.others = [FAR]
    node.objects.left = {FAR: [(7, 1, OWNER)]}
    node.left.node_died(GONE)
    kinds = [message.notice for _, message in node.relay.sent]
    assert kinds == [r.LEFT, r.LEFT_TOLD]  # in this order: the answer says that all was told
    node.hear(r.LEFT_ASKED, 4, GONE)
    assert node.relay.sent[-1] == (FAR, Relayed(notice=r.LEFT_TOLD, items=(4,)))
