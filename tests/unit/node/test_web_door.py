"""The daemon's part of the page: a socket, and a process that is started for who connects."""

from __future__ import annotations

import asyncio
import errno
import gc
import marshal
import os
import socket
import time
from typing import Any

import pytest
from node_ends import until

from miniray.node import web_door
from miniray.node.base.control_socket import control_pair, receive
from miniray.node.base.node_config import WebConfig
from miniray.node.base.template_client import Helper
from miniray.node.web_door import WebDoor


class FakeNode:
    """The facts that the door uses."""

    node_socket = socket_path = cluster_address = logs = "x"
    socket_key = b"k"
    is_head = True
    web = WebConfig("127.0.0.1", 0, "127.0.0.1", b"w" * 32, "abc", "")


class FakeClients:
    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}


class World:
    """A door, and what it has started."""

    def __init__(self) -> None:
        self.clients = FakeClients()
        #: The web processes' ends of their control sockets.
        self.started: list[socket.socket] = []
        self.opened: list[str] = []
        self.door = WebDoor(
            FakeNode(),  # type: ignore[arg-type]
            self.clients,  # type: ignore[arg-type]
            self._fork,
            self.opened.append,
        )

    def _fork(self, module: str) -> Helper:
        assert module == "miniray.web.process"
        ours, theirs = control_pair()
        self.started.append(theirs)
        return Helper(ours, lambda: None)

    def connect(self) -> socket.socket:
        host, _, port = self.door.address.partition(":")
        return socket.create_connection((host, int(port)), 5)

    async def starts(self, count: int) -> None:
        for _ in range(1000):
            if len(self.started) == count:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"{len(self.started)} were started, not {count}")

    async def has_ended(self) -> None:
        """Return when the door knows that its process has ended, and would have had clients."""
        await until(lambda: self.door._helper is None)
        for _ in range(10):
            await asyncio.sleep(0)


async def test_nothing_is_started_before_the_first_client() -> None:
    world = World()
    assert world.door.address == ""
    address = world.door.open()
    assert world.opened == [address] == [world.door.open()]
    assert world.started == []
    with world.connect():
        await world.starts(1)
        data, fds = receive(world.started[0])
        assert marshal.loads(data)["address"] == address
        with socket.socket(fileno=fds[0]) as listener, world.connect():
            assert listener.getsockname()[1] == int(address.rpartition(":")[2])
    world.door.close()


async def test_a_process_that_served_is_followed_by_another_at_the_next_client() -> None:
    world = World()
    world.door.open()
    with world.connect():
        await world.starts(1)
        _, fds = receive(world.started[0])
        with socket.socket(fileno=fds[0]) as listener:
            listener.accept()[0].close()  # it has served
        world.started[0].send(marshal.dumps("serves"))
        world.started[0].close()
    await world.has_ended()
    assert len(world.started) == 1  # nobody is there
    with world.connect():
        await world.starts(2)
    world.door.close()


async def test_one_that_ends_before_it_serves_costs_its_client_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web_door, "_PAUSE", 0)
    world = World()
    world.door.open()
    with world.connect() as client:
        await world.starts(1)
        world.started[0].close()
        client.setblocking(False)
        hung_up = asyncio.get_running_loop().sock_recv(client, 1)
        assert await asyncio.wait_for(hung_up, 20) == b""
        await world.has_ended()
        assert len(world.started) == 1
    with world.connect():
        await world.starts(2)
    world.door.close()


async def test_a_process_that_cannot_be_started_costs_no_descriptor_and_is_not_tried_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    tries: list[str] = []

    def fork(module: str) -> Helper:
        tries.append(module)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(world.door, "fork", fork)
    # Nor can the daemon take the client, to hang up on it.
    monkeypatch.setattr(web_door, "_MOST_TURNED_AWAY", 0)
    monkeypatch.setattr(web_door, "_PAUSE", 0.02)
    world.door.open()
    with world.connect():
        gc.collect()  # what other tests have left
        before = len(os.listdir("/proc/self/fd"))
        began = time.monotonic()
        await until(lambda: len(tries) >= 4)
        assert time.monotonic() - began > 0.04  # two pauses, were the first try before `began`
        assert len(os.listdir("/proc/self/fd")) <= before
        monkeypatch.setattr(world.door, "fork", world._fork)
        await world.starts(1)  # after a while
    world.door.close()


async def test_a_code_is_good_once_and_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    ask, use = world.clients.requests["open_page"], world.clients.requests["use_page_code"]
    (scheme, address, code, token), _ = ask(None)
    assert (scheme, address) == ("http", world.door.address)
    assert len(token) == 64
    assert use(None, "no such code") == (False, -1)
    assert use(None, code) == (True, -1)
    assert use(None, code) == (False, -1)
    (_, _, code, _), _ = ask(None)
    later = asyncio.get_running_loop().time() + 61
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: later)
    assert use(None, code) == (False, -1)
    monkeypatch.undo()
    for _ in range(100):
        ask(None)
    with pytest.raises(ValueError, match="100 codes"):
        ask(None)
    world.door.close()


async def test_a_node_without_the_head_says_where_the_page_is() -> None:
    world = World()
    world.door.node.is_head = False  # type: ignore[misc]
    with pytest.raises(ValueError, match="machine of the cluster's head"):
        world.clients.requests["open_page"](None)
