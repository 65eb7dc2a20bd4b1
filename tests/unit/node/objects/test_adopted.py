"""The daemon in place of owners that are gone, between doubles of its clients and other nodes."""

from __future__ import annotations

import marshal
from types import SimpleNamespace
from typing import Any

import pytest
from kept import kept

from miniray.messages import plain
from miniray.messages import protocol as p
from miniray.node.objects import adopted
from miniray.node.objects.adopted import AdoptedObjects
from miniray.node.relay.relayed import WATCH, Relayed

NODE, FAR = b"node-one", b"node-two"
OWNER, BORROWER = b"owner000", b"borrower"
ID = OWNER + b"00000001"


class Clients:
    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.notices: dict[str, Any] = {}
        self.clients: dict[bytes, Any] = {}


class Relay:
    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Relayed]] = []

    def send(self, node: bytes, message: Relayed) -> bool:
        self.sent.append((node, message))
        return True

    def messages(self, kind: int) -> list[tuple[Any, ...]]:
        bodies = [marshal.loads(body) for _, message in self.sent for body in message.bodies]
        return [body for body in bodies if body[0] == kind]


class Directory:
    def __init__(self) -> None:
        self.freed: list[tuple[bytes, int, bytes]] = []
        self.left: list[tuple[bytes, int, bytes]] = []

    def adopt(self, key: tuple[bytes, int, bytes]) -> None:
        self.left.append(key)

    def free(self, key: tuple[bytes, int, bytes]) -> None:
        self.freed.append(key)


class Owner:
    """A client that leaves an object in shared memory, borrowed on another node."""

    process_id = OWNER
    pid = 7
    is_driver = False


@pytest.fixture
def parts() -> tuple[AdoptedObjects, Relay, Directory]:
    clients, relay, directory = Clients(), Relay(), Directory()
    head: Any = SimpleNamespace(notify=lambda *_: None)
    others: Any = (clients, relay, directory, head)
    service = AdoptedObjects(NODE, *others)
    value = (p.VALUE_SHARED, (NODE, 7, NODE, 1000), ())
    clients.requests["adopt"](Owner(), [(ID, value, ((BORROWER, FAR, 1),), ())])
    return service, relay, directory


def test_what_is_left_is_watched_and_answered_for(
    parts: tuple[AdoptedObjects, Relay, Directory],
) -> None:
    service, relay, directory = parts
    assert directory.left == [(NODE, 7, NODE)]
    assert relay.sent == [(FAR, Relayed(to=BORROWER, sender=NODE, notice=WATCH))]
    service.answer(FAR, BORROWER, OWNER, [plain.dumps((p.PEER_WANT, [(ID, None)]))])
    [(_, values)] = relay.messages(p.PEER_VALUE)
    assert values[0][0] == ID


def test_it_is_freed_when_its_last_borrower_lets_go_or_dies(
    parts: tuple[AdoptedObjects, Relay, Directory],
) -> None:
    service, _relay, directory = parts
    service.process_died(BORROWER)
    assert directory.freed == [(NODE, 7, NODE)]
    assert not service.speaks_for(OWNER)


def test_what_a_process_of_this_node_borrowed_is_freed_if_it_is_not_connected(
    parts: tuple[AdoptedObjects, Relay, Directory],
) -> None:
    service, _relay, directory = parts
    living, gone = b"living00", b"gone0000"
    service.clients.clients[living] = object()  # type: ignore[assignment]
    adopt: Any = service.clients.requests["adopt"]
    for number, borrower in enumerate((living, gone)):
        value = (p.VALUE_SHARED, (NODE, number, NODE, 1000), ())
        adopt(Owner(), [(OWNER + borrower, value, ((borrower, NODE, 1),), ())])
    assert directory.freed == [(NODE, 1, NODE)]


class Unwalked(dict[Any, Any]):
    def items(self) -> Any:
        raise AssertionError("all objects are walked over")

    __iter__ = values = items


def test_the_end_of_a_process_costs_no_walk_over_all_objects(
    parts: tuple[AdoptedObjects, Relay, Directory],
) -> None:
    service, _relay, directory = parts
    service._objects = Unwalked(service._objects)
    service.process_died(b"another")
    assert not directory.freed
    service.node_died(FAR)
    assert directory.freed == [(NODE, 7, NODE)]
    assert not service._held_by


def test_for_whom_arguments_are_kept_is_known_until_the_actor_is_dead(
    parts: tuple[AdoptedObjects, Relay, Directory],
) -> None:
    service, _relay, directory = parts
    actor_id, inner = OWNER + b"00000002", OWNER + b"00000003"
    value = (p.VALUE_SHARED, (NODE, 8, NODE, 1000), ())
    service.clients.notices["keep_arguments"](Owner(), actor_id, value, ((inner, FAR),))
    assert service.actors == {actor_id}
    service.actor_died(actor_id)
    assert not service.actors
    assert directory.freed == [(NODE, 8, NODE)]


def test_a_process_is_told_what_was_taken_and_a_daemon_is_not(
    parts: tuple[AdoptedObjects, Relay, Directory],
) -> None:
    service, relay, _directory = parts
    body = plain.dumps((p.PEER_WANT, [(ID, None)] * 1000))
    service.answer(FAR, BORROWER, OWNER, [body, body])
    assert relay.messages(p.PEER_CREDIT) == [(p.PEER_CREDIT, 2 * len(body))]
    service.answer(FAR, FAR, OWNER, [body])  # two daemons would answer each other for ever
    assert len(relay.messages(p.PEER_CREDIT)) == 1


def borrow(service: AdoptedObjects, number: int, process: bytes, node: bytes) -> None:
    """A borrower, already counted, reports another one."""
    message = (p.PEER_BORROW, number, [(ID, process, node)])
    service.answer(FAR, BORROWER, OWNER, [plain.dumps(message)])


def release(service: AdoptedObjects, process: bytes, node: bytes) -> None:
    service.answer(node, process, OWNER, [plain.dumps((p.PEER_UNBORROW, [ID]))])


def test_another_daemon_holds_objects_until_it_lets_go_or_its_node_dies(
    parts: tuple[AdoptedObjects, Relay, Directory],
) -> None:
    service, relay, directory = parts
    borrow(service, 0, FAR, FAR)
    # Watched as a process it would be said to be gone.
    assert [message.to for _, message in relay.sent if message.notice == WATCH] == [BORROWER]
    service.process_died(BORROWER)
    assert directory.freed == []
    service.node_died(FAR)
    assert directory.freed == [(NODE, 7, NODE)]


def test_a_borrow_that_is_sent_again_counts_once(
    parts: tuple[AdoptedObjects, Relay, Directory],
) -> None:
    service, relay, directory = parts
    for _ in range(2):
        borrow(service, 5, b"process2", FAR)
    assert relay.messages(p.PEER_ACK) == [(p.PEER_ACK, 5)] * 2
    release(service, b"process2", FAR)
    service.process_died(BORROWER)
    assert directory.freed == [(NODE, 7, NODE)]


def test_a_borrow_that_comes_after_its_release_holds_nothing(
    parts: tuple[AdoptedObjects, Relay, Directory],
) -> None:
    service, _relay, directory = parts
    release(service, b"process2", FAR)
    borrow(service, 5, b"process2", FAR)
    assert directory.freed == []
    service.process_died(BORROWER)
    assert directory.freed == [(NODE, 7, NODE)]


def test_a_release_whose_borrow_nobody_lives_to_report_holds_nothing(
    parts: tuple[AdoptedObjects, Relay, Directory],
) -> None:
    service, _relay, directory = parts
    release(service, b"process2", FAR)
    assert directory.freed == []
    service.process_died(BORROWER)
    assert directory.freed == [(NODE, 7, NODE)]


def test_a_borrower_of_this_node_that_has_ended_holds_nothing(
    parts: tuple[AdoptedObjects, Relay, Directory],
) -> None:
    service, _relay, directory = parts
    service.runs = lambda process: process != b"process2"
    borrow(service, 5, b"process2", NODE)
    service.process_died(BORROWER)
    assert directory.freed == [(NODE, 7, NODE)]


def test_what_is_remembered_of_borrows_is_bounded_and_a_repeated_one_counts_once(
    parts: tuple[AdoptedObjects, Relay, Directory], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, _, directory = parts
    monkeypatch.setattr(adopted, "_REMEMBERED", 10)

    def tell(*message: Any) -> None:
        service.answer(FAR, BORROWER, OWNER, [plain.dumps(message)])

    sizes = []
    for number in range(1, 100):
        tell(p.PEER_BORROW, number, [(ID, BORROWER, FAR)])
        tell(p.PEER_BORROW, number, [(ID, BORROWER, FAR)])
        tell(p.PEER_UNBORROW, [ID])
        sizes.append(kept(service))
    assert sizes[-1] == sizes[20]
    tell(p.PEER_UNBORROW, [ID])
    assert directory.freed == [(NODE, 7, NODE)]
    assert kept(service) < sizes[0]


def test_nothing_is_remembered_of_senders_when_the_last_object_of_an_owner_is_gone(
    parts: tuple[AdoptedObjects, Relay, Directory],
) -> None:
    service, _, directory = parts
    want = plain.dumps((p.PEER_WANT, [(ID, None)]))
    service.answer(FAR, b"passer-by", OWNER, [want])
    service.process_died(BORROWER)
    assert directory.freed
    before = kept(service)
    service.answer(FAR, b"passer-by", OWNER, [want])
    assert kept(service) == before
