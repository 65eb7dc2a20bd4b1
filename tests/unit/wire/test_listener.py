"""Who listens for connections, and who serves them."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from open_files import open_files
from process_doubles import eventually
from wire_ends import End

from miniray.node.base.clients import AsyncPoller
from miniray.wire import sockets as sockets_module
from miniray.wire.sockets import Listener, connect

if TYPE_CHECKING:
    from pathlib import Path

    from miniray.wire.io_loop import IOLoop


# --- listening ----------------------------------------------------------------------


def test_a_listener_accepts_and_removes_its_socket_at_the_end(loop: IOLoop, tmp_path: Path) -> None:
    file = tmp_path / "s"
    path = str(file)
    ends: list[End] = []
    listener = Listener(path, loop, lambda sock: ends.append(End(sock, loop, server=True)))
    clients = [End(connect(path), loop, server=False) for _ in range(5)]
    for number, client in enumerate(clients):
        client.conn.send((number,))
    eventually(lambda: sorted(m[0] for end in ends for m in end.messages) == list(range(5)))
    done = threading.Event()
    loop.call_soon(lambda: (listener.close(), done.set()))
    assert done.wait(10)
    assert not file.exists()
    with pytest.raises(OSError, match="No such file"):
        connect(path)


def test_a_listener_out_of_descriptors_rests_and_goes_on_later(
    loop: IOLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sockets_module, "_ACCEPT_AGAIN", 0.05)
    path = str(tmp_path / "s")
    ends: list[End] = []
    listener = Listener(path, loop, lambda sock: ends.append(End(sock, loop, server=True)))
    attempts = []
    real = listener._sock

    class Short:
        def accept(self) -> Any:
            attempts.append(1)
            if len(attempts) <= 3:
                raise OSError(24, "Too many open files")
            return real.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    listener._sock = Short()  # type: ignore[assignment]
    client = End(connect(path), loop, server=False)
    client.conn.send((1, "patient"))
    eventually(lambda: ends and ends[0].messages)
    assert len(attempts) == 5  # three times in vain, the client, nobody more
    assert sum("could not accept" in record.message for record in caplog.records) == 3
    done = threading.Event()
    loop.call_soon(lambda: (listener.close(), done.set()))
    assert done.wait(10)


def test_connect_to_nobody_says_so_and_leaks_nothing(tmp_path: Path) -> None:
    before = open_files()
    with pytest.raises(FileNotFoundError):
        connect(str(tmp_path / "nobody"))
    path = tmp_path / "dead"
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.close()
    with pytest.raises(ConnectionRefusedError):
        connect(str(path))
    assert not open_files() - before


# --- the loops ----------------------------------------------------------------------


def test_connections_work_the_same_on_an_asyncio_loop() -> None:
    async def main() -> None:
        poller = AsyncPoller(asyncio.get_running_loop())
        ours, theirs = socket.socketpair()
        server = End(ours, poller, server=True)
        client = End(theirs, poller, server=False)
        for number in range(100):
            client.conn.post((number, b"x" * 20_000))
        server.conn.send_with_fds((0,), [os.memfd_create("test")])
        deadline = time.monotonic() + 10
        while len(server.messages) < 100 or not client.messages:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)
        os.close(client.conn.take_fd())
        client.conn.close()
        while not server.closed.is_set() or not client.closed.is_set():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)

    asyncio.run(main())
    gc.collect()
