"""Streams between daemons that break: every message arrives once, and in order."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest
from node_ends import dial, message, numbers, two_ends, until

from miniray._proto import node_pb2
from miniray.common.config import config
from miniray.messages import plain
from miniray.node.relay import relay as relay_module
from miniray.node.relay import relayed
from miniray.node.relay.relay import RelayHub
from miniray.node.relay.relayed import (
    ANSWER,
    FREED,
    MESSAGES,
    PUSH,
    REQUEST,
    Inbox,
    Outbox,
    Relayed,
)
from miniray.security import channels

if TYPE_CHECKING:
    from pathlib import Path


def _ignore(_node_id: bytes) -> None:
    """Nothing here is about a node."""


# --- the boxes ---------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(20))
def test_whatever_breaks_each_message_is_accepted_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    outbox, inbox = Outbox(), Inbox()
    on_the_wire: list[node_pb2.RelayBatch] = []
    accepted: list[int] = []
    sent = 0
    while sent < 200 or len(accepted) < 200:
        step = rng.random()
        if step < 0.3 and sent < 200:
            outbox.put(message(sent))
            sent += 1
        elif step < 0.6:
            batch = outbox.take()
            if numbers(Inbox().accept(batch)):
                on_the_wire.append(batch)
        elif step < 0.85 and on_the_wire:
            accepted += numbers(inbox.accept(on_the_wire.pop(0)))
            if rng.random() < 0.5:
                outbox.acknowledged(inbox.acknowledge())
        elif step > 0.95:
            if on_the_wire and rng.random() < 0.5:  # the last ones are still read
                accepted += numbers(inbox.accept(on_the_wire.pop(0)))
            on_the_wire.clear()
            outbox.rewind()
    assert accepted == list(range(200))


def test_what_was_given_up_is_not_sent_and_what_follows_is() -> None:
    outbox, inbox = Outbox(), Inbox()
    outbox.put(message(0))
    assert numbers(inbox.accept(outbox.take())) == [0]
    outbox.put(message(1))
    outbox.give_up()
    outbox.put(message(2))
    assert inbox.gaps == 0
    notice, after = inbox.accept(outbox.take())
    assert notice == Relayed()
    assert numbers([after]) == [2]
    assert inbox.gaps == 1


def test_notices_are_kept_when_what_processes_said_is_given_up() -> None:
    outbox, inbox = Outbox(), Inbox()
    freed = [Relayed(notice=FREED, items=(n,)) for n in range(4)]
    for each in (freed[0], message(0), freed[1]):
        outbox.put(each)
    first = outbox.take()
    for each in (message(1), freed[2]):
        outbox.put(each)
    assert len(inbox.accept(first)) == 3  # and that is not acknowledged
    outbox.give_up()
    outbox.put(freed[3])
    outbox.rewind()
    assert [m for m in inbox.accept(outbox.take()) if m != Relayed()] == freed[2:]
    assert inbox.gaps >= 1


def test_notices_that_never_left_arrive_after_all_else_was_given_up() -> None:
    outbox, inbox = Outbox(), Inbox()
    freed = [Relayed(notice=FREED, items=(n,)) for n in range(3)]
    for each in (freed[0], message(0), freed[1], message(1), freed[2]):
        outbox.put(each)
    outbox.take()  # lost with its stream
    outbox.give_up()
    outbox.rewind()
    assert [m for m in inbox.accept(outbox.take()) if m != Relayed()] == freed


def test_a_new_outbox_of_a_node_begins_to_count_anew() -> None:
    inbox = Inbox()
    for round in range(2):
        outbox = Outbox()
        outbox.put(message(round))
        assert numbers(inbox.accept(outbox.take())) == [round]


def test_what_is_told_of_an_older_outbox_says_nothing_of_the_new_one() -> None:
    old, new, inbox = Outbox(), Outbox(), Inbox()
    for number in range(3):
        old.put(message(number))
    inbox.accept(old.take())
    late = inbox.acknowledge()  # the node was given up and came back meanwhile
    new.put(message(7))
    new.take()
    new.acknowledged(late)
    new.rewind()  # the stream broke
    assert numbers(inbox.accept(new.take())) == [7]


async def test_what_goes_to_a_node_tells_by_the_way_what_has_come_from_it() -> None:
    here, there, inbox = Outbox(), Outbox(), Inbox()
    written: list[node_pb2.RelayBatch] = []

    async def write(batch: node_pb2.RelayBatch) -> None:
        written.append(batch)

    there.put(message(1))
    inbox.accept(there.take())
    draining = asyncio.ensure_future(here.drain_to(write, inbox))
    for number in range(2):
        here.put(message(number))
        await until(lambda number=number: len(written) > number)
    draining.cancel()
    assert [batch.received for batch in written] == [1, 0]  # once is enough
    there.acknowledged(written[0])
    there.rewind()
    assert numbers(Inbox().accept(there.take())) == []


def test_much_is_acknowledged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayed, "_MUCH", 1000)
    outbox, inbox = Outbox(), Inbox()
    outbox.put(message(1))
    inbox.accept(outbox.take())
    assert not inbox.is_due
    outbox.put(Relayed(b"to", b"from", [bytes(1000)]))
    inbox.accept(outbox.take())
    assert inbox.is_due
    inbox.acknowledge()
    assert not inbox.is_due


# --- over real streams -------------------------------------------------------------------
async def test_what_was_received_is_acknowledged_though_nothing_goes_that_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relayed, "_MUCH", 1000)
    async with two_ends(tmp_path) as (a, b):
        for after, data in ((0.01, b""), (60.0, bytes(1000))):
            monkeypatch.setattr(relay_module, "_ACKNOWLEDGE_AFTER", after)
            a.hub.send(b.id, message(1)._replace(bodies=[data]))
            box = a.hub._outboxes[b.id]
            await until(lambda box=box: not box._waiting and not box._sent)


async def test_a_large_message_arrives_and_so_do_those_behind_it(tmp_path: Path) -> None:
    size = 100 << 20
    hubs, servers, got = {}, [], []
    for name in (b"a", b"b"):
        hub = hubs[name] = RelayHub(
            name, lambda address: channels.channel(address, "secret"), _ignore
        )
        server = channels.server("secret")
        hub.add_to(server)
        channels.listen_unix(server, str(tmp_path / name.decode()))
        await server.start()
        servers.append(server)
    hubs[b"b"].notices[MESSAGES] = lambda _node, each: got.append(sum(map(len, each.bodies)))
    hubs[b"a"].joined(b"b", f"unix:{tmp_path}/b")
    hubs[b"b"].joined(b"a", "")
    try:
        hubs[b"a"].send(b"b", message(0))
        hubs[b"a"].send(b"b", Relayed(b"to", b"from", [bytes(size), b"end"]))
        hubs[b"a"].send(b"b", message(1))
        await until(lambda: len(got) == 3)
    finally:
        for hub in hubs.values():
            await hub.close()
        for server in servers:
            await server.stop(None)
    assert got == [4, size + 3, 4]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "_REOPEN_AFTER", 0.01)
    monkeypatch.setattr(relay_module, "_REOPEN_AT_MOST", 0.05)


async def test_there_is_no_way_between_two_nodes_that_only_dial(tmp_path: Path) -> None:
    hub = RelayHub(b"a", dial, _ignore, only_dials=True)
    hub.joined(b"b", "")
    assert not hub.send(b"b", message(1))
    assert hub.connected() == set()
    hub.joined(b"c", f"unix:{tmp_path}/nobody")
    assert hub.send(b"c", message(1))
    await hub.close()


@pytest.mark.parametrize("dialable", [True, False], ids=["both dial", "one dials"])
async def test_messages_survive_broken_connections(tmp_path: Path, dialable: bool) -> None:
    async with two_ends(tmp_path, dialable=dialable) as (a, b):
        for number in range(300):
            a.hub.send(b.id, message(number))
            b.hub.send(a.id, message(number))
            if number % 60 == 59:
                await asyncio.sleep(0.05)
                a.breaker.cut()
                b.breaker.cut()
            elif number % 7 == 0:
                await asyncio.sleep(0.001)
        await until(lambda: len(a.got.get(b.id, ())) >= 300 <= len(b.got.get(a.id, ())))
        assert a.got[b.id] == b.got[a.id] == list(range(300))
        assert a.lost == b.lost == []


def test_a_node_out_of_reach_for_long_is_reported_once_and_heard_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIRAY_NODE_TIMEOUT", "1")
    config.cache_clear()

    async def run() -> None:
        async with two_ends(tmp_path) as (a, b):
            b.breaker.refuses = True
            a.hub.send(b.id, message(0))
            await until(lambda: a.lost)
            tries = b.breaker.refused
            await until(lambda: b.breaker.refused >= tries + 3)
            assert a.lost == [b.id]
            b.breaker.refuses = False
            a.hub.send(b.id, message(1))
            await until(lambda: b.got)
            assert b.got == {a.id: [1]}
            assert b.lost == [a.id]  # it may have waited for what was given up

    try:
        asyncio.run(run())
    finally:
        config.cache_clear()


@pytest.mark.parametrize("dialable", [True, False], ids=["both dial", "one dials"])
async def test_a_node_that_comes_back_after_it_was_given_up_is_told(
    tmp_path: Path, dialable: bool
) -> None:
    async with two_ends(tmp_path, dialable=dialable) as (a, b):
        for number in range(2):
            a.hub.send(b.id, message(number))
            b.hub.send(a.id, message(number))
            await until(lambda: len(a.got.get(b.id, ())) == len(b.got.get(a.id, ())) == 1)
            if number == 0:
                b.hub.died(a.id)
                b.hub.joined(a.id, a.address if dialable else "")
                await until(lambda: a.lost)
                a.got.clear()
                b.got.clear()
        assert a.got == {b.id: [1]}
        assert b.got == {a.id: [1]}, "not what had come before"
        assert (a.lost, b.lost) == ([b.id], [])


async def test_nothing_is_sent_to_a_node_that_died(tmp_path: Path) -> None:
    async with two_ends(tmp_path) as (a, b):
        assert a.hub.send(b.id, message(0))
        await until(lambda: b.got)
        a.hub.died(b.id)
        assert not a.hub.send(b.id, message(1))


# --- messages that cannot be handled ------------------------------------------------------
def test_a_message_that_cannot_be_handled_harms_no_other_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with two_ends(tmp_path) as (a, b):
            told: list[Relayed] = []
            a.hub.notices[PUSH] = lambda _node, each: told.append(each)
            bad = Relayed(to=b"to", sender=b"bad process", bodies=[7])  # type: ignore[list-item]
            a.hub.send(b.id, message(0))
            a.hub._outboxes[b.id]._waiting.append((50, bad))
            a.hub.send(b.id, message(1))
            await until(lambda: b.got.get(a.id) == [0, 1])
            await until(lambda: told)
            assert told[0].to == b"bad process"
            assert told[0].items == ("process_unreachable", (b"to",))
            assert not b.lost

    asyncio.run(run())
    assert b"bad process".hex() in caplog.text


async def test_a_question_that_cannot_be_handled_is_answered_all_the_same(tmp_path: Path) -> None:
    async with two_ends(tmp_path) as (a, b):
        told: list[Relayed] = []
        a.hub.notices[ANSWER] = lambda _node, each: told.append(each)
        a.hub.send(b.id, Relayed(notice=REQUEST, items=(5, "read")))
        a.hub.send(b.id, message(1))
        await until(lambda: told and b.got.get(a.id))
        assert told[0].items[0] == 5
        assert told[0].items[1]


def test_in_place_of_messages_that_cannot_be_read_stands_that_they_were_lost() -> None:
    inbox = Inbox()
    good = plain.dumps([tuple(message(1)), (1, 2), tuple(message(2))])
    for first, data in ((1, b"(" + b"\xff" * 4), (2, good), (5, plain.dumps(5))):
        accepted = inbox.accept(node_pb2.RelayBatch(messages=data, first=first, outbox=1))
        assert numbers([each for each in accepted if each != Relayed()]) == (
            [1, 2] if data is good else []
        )
    assert inbox.gaps == 3
    assert inbox.received == 5
