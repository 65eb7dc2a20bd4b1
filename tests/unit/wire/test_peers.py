"""Connections to other processes of the machine, and their ends."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

from process_doubles import eventually
from wire_ends import KEY, End

from miniray.messages import protocol as p
from miniray.wire import peers as peers_module
from miniray.wire.connection import Connection
from miniray.wire.peers import Peer, PeerTable, socket_path
from miniray.wire.sockets import connect

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from miniray.wire.io_loop import IOLoop

NODE, ME, OTHER = b"node0000", b"process0", b"process1"


class Link:
    """The daemon of this node."""

    process_id = ME
    key = KEY

    def __init__(self, loop: IOLoop, folder: Path) -> None:
        self.loop = loop
        self.folder = str(folder)


def test_a_connection_that_ends_as_it_is_made_is_not_waited_for(
    loop: IOLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Peer] = []
    link: Any = Link(loop, tmp_path)
    table = PeerTable(link, NODE, on_lost=lost.append)

    def ends_at_once(sock: socket.socket, *args: Any, **how: Any) -> Connection:
        conn = Connection(sock, *args, **how)
        listener.accept()[0].close()
        eventually(lambda: sock.fileno() < 0)
        return conn

    monkeypatch.setattr(peers_module, "Connection", ends_at_once)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(socket_path(str(tmp_path), OTHER))
        listener.listen()
        peer = table.get(NODE, OTHER)
    eventually(lambda: lost == [peer])
    hanging_up = threading.Thread(target=table.hang_up, daemon=True)
    hanging_up.start()
    hanging_up.join(5)
    assert not hanging_up.is_alive()


def test_a_connection_that_is_made_after_hanging_up_is_not_waited_for(
    loop: IOLoop, tmp_path: Path
) -> None:
    link: Any = Link(loop, tmp_path)
    table = PeerTable(link, NODE, on_lost=lambda _: None)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as later,
    ):
        for listener, name in ((other, OTHER), (later, b"process2")):
            listener.bind(socket_path(str(tmp_path), name))
            listener.listen()
        table.get(NODE, OTHER)
        end, _ = other.accept()
        hanging_up = threading.Thread(target=table.hang_up, daemon=True)
        hanging_up.start()
        while end.recv(4096):  # until it has hung up
            pass
        table.get(NODE, b"process2")
        stays_open, _ = later.accept()
        end.close()
        hanging_up.join(5)
        assert not hanging_up.is_alive()
        stays_open.close()


def test_a_message_of_an_unknown_kind_is_logged_and_the_next_one_handled(
    loop: IOLoop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handled: list[Any] = []
    link: Any = Link(loop, tmp_path)
    table = PeerTable(link, NODE, on_lost=lambda _: None)
    table.on_kind[p.PEER_CALL] = lambda peer, message: handled.append((peer.process_id, message))
    other = End(connect(socket_path(str(tmp_path), ME)), loop, server=False)
    for message in ((p.PEER_HELLO, NODE, OTHER), (999, "what"), (p.PEER_CALL, "call")):
        other.conn.send(message)
    eventually(lambda: handled == [(OTHER, (p.PEER_CALL, "call"))])
    assert "a peer sent message kind 999, which this process does not know" in caplog.text
    table.close()
