"""Streams between daemons that break: every message arrives once, and in order."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest
from node_ends import dial, message, numbers, two_ends, until

from miniray.config import config
from miniray.node import relay as relay_module
from miniray.node.relay import RelayHub
from miniray.node.relay_box import Inbox, Outbox
from miniray.node.relayed import Relayed

if TYPE_CHECKING:
    from pathlib import Path

    from miniray._proto import node_pb2


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
                outbox.acknowledged(inbox.received)
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


def test_a_new_outbox_of_a_node_begins_to_count_anew() -> None:
    inbox = Inbox()
    for round in range(2):
        outbox = Outbox()
        outbox.put(message(round))
        assert numbers(inbox.accept(outbox.take())) == [round]


# --- over real streams -------------------------------------------------------------------
@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "_REOPEN_AFTER", (0.01, 0.05))


def test_there_is_no_way_between_two_nodes_that_only_dial(tmp_path: Path) -> None:
    async def run() -> None:
        hub = RelayHub(b"a", dial, only_dials=True)
        hub.joined(b"b", "")
        assert not hub.send(b"b", message(1))
        assert hub.connected() == set()
        hub.joined(b"c", f"unix:{tmp_path}/nobody")
        assert hub.send(b"c", message(1))
        await hub.close()

    asyncio.run(run())


@pytest.mark.parametrize("dialable", [True, False], ids=["both dial", "one dials"])
def test_messages_survive_broken_connections(tmp_path: Path, dialable: bool) -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_a_node_out_of_reach_for_long_is_reported_once_and_heard_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIRAY_NODE_TIMEOUT", "0.3")
    config.cache_clear()

    async def run() -> None:
        async with two_ends(tmp_path) as (a, b):
            b.breaker.refuses = True
            a.hub.send(b.id, message(0))
            await until(lambda: a.lost)
            await asyncio.sleep(0.3)
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


def test_nothing_is_sent_to_a_node_that_died(tmp_path: Path) -> None:
    async def run() -> None:
        async with two_ends(tmp_path) as (a, b):
            assert a.hub.send(b.id, message(0))
            await until(lambda: b.got)
            a.hub.died(b.id)
            assert not a.hub.send(b.id, message(1))

    asyncio.run(run())
