"""What a connection still says and hears when it ends, and descriptors that go over it."""

from __future__ import annotations

import contextlib
import marshal
import os
import resource
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any

from open_files import open_files
from process_doubles import eventually
from wire_ends import KEY, End, fill, make_pair, raw_client

from miniray.wire.sockets import encode

if TYPE_CHECKING:
    from miniray.wire.connection import Connection
    from miniray.wire.io_loop import IOLoop


# --- descriptors --------------------------------------------------------------------


def test_descriptors_come_with_their_frames_in_order(loop: IOLoop) -> None:
    taken: list[tuple[int, bytes]] = []

    def take(conn: Connection, message: tuple[Any, ...]) -> None:
        if message[1]:
            fd = conn.take_fd()
            taken.append((message[0], os.pread(fd, 100, 0)))
            os.close(fd)

    ours, theirs = socket.socketpair()
    fill(ours)
    server = End(ours, loop, server=True)
    client = End(theirs, loop, server=False, on_message=take)
    before = open_files()
    for number in range(200):
        if number % 3:
            server.conn.send((number, False, b"x" * 3000))
        else:
            fd = os.memfd_create("test")
            os.write(fd, b"content %d" % number)
            server.conn.send_with_fds((number, True, b"y" * (number * 50)), [fd])
    eventually(lambda: len(client.messages) == 200)
    assert [message[0] for message in client.messages] == list(range(200))
    assert taken == [(number, b"content %d" % number) for number in range(0, 200, 3)]
    assert not open_files() - before


def test_descriptors_of_a_connection_that_closes_are_closed(loop: IOLoop) -> None:
    before = open_files()
    ours, theirs = socket.socketpair()
    fill(ours)
    server = End(ours, loop, server=True)
    client = End(theirs, loop, server=False)
    eventually(lambda: client.conn._challenge is None)
    for number in range(50):
        server.conn.send_with_fds((number, b"x" * 4000), [os.memfd_create("test")])
    server.conn.close()
    client.conn.close()
    assert server.closed.wait(10)
    assert client.closed.wait(10)
    server.conn.send_with_fds((99,), [os.memfd_create("late")])
    assert not open_files() - before


def test_a_process_out_of_descriptors_hears_so_and_the_next_one_is_right(loop: IOLoop) -> None:
    """The kernel drops what it has no number for; later descriptors keep their frames."""
    outcomes: list[Any] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def take(conn: Connection, message: tuple[Any, ...]) -> None:
        try:
            fd = conn.take_fd()
        except OSError as error:
            outcomes.append(error)
        else:
            outcomes.append(os.pread(fd, 100, 0))
            os.close(fd)

    ours, theirs = socket.socketpair()
    server = End(ours, loop, server=True)
    client = End(theirs, loop, server=False, on_message=take)
    eventually(lambda: client.conn._challenge is None)
    first, second = os.memfd_create("first"), os.memfd_create("second")
    os.write(second, b"second")
    lowest = os.dup(0)
    os.close(lowest)
    # Numbers up to `first` are taken, those above are forbidden: there is none to give.
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(first, second, lowest) + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        server.conn.send((0,))  # handled like the others: says that it has none
        data = encode((1,))
        with server.conn._lock:
            socket.send_fds(ours, [data], [first])
        eventually(lambda: len(outcomes) == 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
    server.conn.send_with_fds((2,), [second])
    eventually(lambda: len(outcomes) == 3)
    os.close(first)
    assert isinstance(outcomes[0], OSError)
    assert "too many open files" in str(outcomes[1])
    assert outcomes[2] == b"second"


# --- closing and flushing -------------------------------------------------------------


def test_what_a_peer_said_before_it_hung_up_is_heard(loop: IOLoop) -> None:
    server, sock = raw_client(loop)
    sock.send(b"".join(encode((number, b"x" * 1000)) for number in range(100)))
    sock.close()
    for _ in range(5):
        server.conn.send((0,))
    assert server.closed.wait(10)
    assert len(server.messages) == 100


def test_what_a_peer_said_with_its_proof_before_it_hung_up_is_heard(loop: IOLoop) -> None:
    from miniray.security.challenge import ClientChallenge

    ours, theirs = socket.socketpair()
    server = End(ours, loop, server=True)
    proof, _ = ClientChallenge(KEY).feed(theirs.recv(32))

    def say_and_go() -> None:  # where the server cannot read in between
        theirs.send(proof + encode((1, "last words")))
        theirs.close()

    loop.call_soon(say_and_go)
    assert server.closed.wait(10)
    assert server.messages == [(1, "last words")]


def test_what_a_process_that_is_gone_said_last_is_heard_at_once(loop: IOLoop) -> None:
    server, sock = raw_client(loop)
    told = threading.Event()

    def learn_that_it_is_gone() -> None:
        sock.send(b"".join(encode((number, b"x" * 1000)) for number in range(100)))
        sock.close()
        server.conn.read_to_end()
        heard.append(len(server.messages))
        told.set()

    heard: list[int] = []
    loop.call_soon(learn_that_it_is_gone)
    assert told.wait(10)
    assert heard == [100]
    assert server.closed.wait(10)


def test_reading_to_the_end_does_not_wait_for_who_still_has_the_socket(loop: IOLoop) -> None:
    server, sock = raw_client(loop)
    sock.send(encode((1,)))
    loop.call_soon(server.conn.read_to_end)
    assert server.closed.wait(10)
    assert server.messages == [(1,)]
    sock.close()


def test_close_in_the_middle_of_a_full_socket_drops_the_rest(loop: IOLoop) -> None:
    server, sock = raw_client(loop)
    for _ in range(100):
        server.conn.send((1, b"x" * 50_000))
    server.conn.close()
    server.conn.send((2,))
    assert server.closed.wait(10)
    assert server.conn.backlog() == 0
    sock.close()


def test_flush_writes_what_is_queued_and_what_is_posted(loop: IOLoop) -> None:
    server, client = make_pair(loop)
    eventually(lambda: client.conn._challenge is None)
    for number in range(20):
        client.conn.post((number, b"x" * 1000))
    assert client.conn.flush_blocking(10.0)
    assert client.conn.backlog() == 0
    eventually(lambda: len(server.messages) == 20)


def test_flush_gives_up_on_a_peer_that_does_not_read(loop: IOLoop) -> None:
    server, sock = raw_client(loop)
    for _ in range(100):
        server.conn.send((1, b"x" * 50_000))
    assert not server.conn.flush_blocking(0.05)
    sock.close()
    assert server.closed.wait(10)
    assert not server.conn.flush_blocking(0.05)


def test_flush_waits_for_the_challenge_rather_than_break_it(loop: IOLoop) -> None:
    ours, theirs = socket.socketpair()
    client = End(theirs, loop, server=False)
    client.conn.send((1, "last words"))
    assert not client.conn.flush_blocking(0.02)
    server = End(ours, loop, server=True)
    assert client.conn.flush_blocking(10.0)
    eventually(lambda: server.messages == [(1, "last words")])


def test_a_send_from_a_finalizer_inside_a_send_breaks_no_frame(loop: IOLoop) -> None:
    """A garbage collection may run user code while a connection writes."""
    server, sock = raw_client(loop)
    conn = server.conn
    nested = iter(range(1000, 2000))

    plain = conn._sock

    class Hook:
        """Behaves as if a collection came right after the kernel took a part of a frame."""

        def send(self, data: Any) -> int:
            sent = plain.send(data[: max(1, len(data) // 2)])
            conn.send((next(nested), b"nested" * 100))
            conn.post((next(nested), b"nested" * 100))
            return sent

        def __getattr__(self, name: str) -> Any:
            return getattr(plain, name)

    conn._sock = Hook()  # type: ignore[assignment]
    for number in range(20):
        conn.send((number, b"outer" * 500))
    conn._sock = plain
    conn.send((99,))
    sock.settimeout(10)
    data = bytearray()
    messages: list[tuple[Any, ...]] = []
    while not messages or messages[-1] != (99,):
        data += sock.recv(1 << 16)
        while len(data) >= 4 and len(data) >= 4 + struct.unpack_from("<I", data)[0]:
            (length,) = struct.unpack_from("<I", data)
            messages.append(marshal.loads(data[4 : 4 + length]))
            del data[: 4 + length]
    outer = [message[0] for message in messages if message[0] < 20]
    assert outer == list(range(20))
    inner = [message[0] for message in messages if message[0] >= 1000]
    assert inner == sorted(inner)
    assert len(inner) >= 2
    sock.close()


def test_a_connection_is_forgotten_once_it_is_closed(loop: IOLoop) -> None:
    before = open_files()
    pairs = [make_pair(loop) for _ in range(20)]
    for server, client in pairs:
        client.conn.send((1,))
        eventually(lambda server=server: server.messages)
        client.conn.close()
    for server, client in pairs:
        assert server.closed.wait(10)
        assert client.closed.wait(10)
    assert not open_files() - before
