from __future__ import annotations

import asyncio
import contextlib
import gc
import marshal
import os
import resource
import socket
import struct
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from core_doubles import eventually
from open_files import open_files

from miniray.core import frames
from miniray.core import listener as listener_module
from miniray.core.frames import encode
from miniray.core.listener import Listener, connect
from miniray.core.node_link import NodeLink
from miniray.core.wire import Connection
from miniray.node.async_poller import AsyncPoller
from miniray.security.challenge import answer_blocking

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from miniray.core.io_loop import IOLoop

KEY = b"k" * 32


class End:
    """A connection that notes what happens to it."""

    def __init__(
        self,
        sock: socket.socket,
        loop: Any,
        *,
        server: bool,
        key: bytes = KEY,
        auth_timeout: float = 10.0,
        on_message: Callable[[Connection, tuple[Any, ...]], None] | None = None,
    ) -> None:
        self.messages: list[tuple[Any, ...]] = []
        self.closed = threading.Event()
        self.closes = 0
        self.threads: set[threading.Thread] = set()
        self._extra = on_message
        self.conn = Connection(
            sock,
            loop,
            key,
            server=server,
            on_message=self._on_message,
            on_close=self._on_close,
            auth_timeout=auth_timeout,
            takes_fds=True,
        )

    def _on_message(self, conn: Connection, message: tuple[Any, ...]) -> None:
        self.threads.add(threading.current_thread())
        self.messages.append(message)
        if self._extra is not None:
            self._extra(conn, message)

    def _on_close(self, _conn: Connection) -> None:
        self.threads.add(threading.current_thread())
        self.closes += 1
        self.closed.set()


def make_pair(loop: IOLoop, **how: Any) -> tuple[End, End]:
    ours, theirs = socket.socketpair()
    return End(ours, loop, server=True, **how), End(theirs, loop, server=False)


def raw_client(loop: IOLoop, **how: Any) -> tuple[End, socket.socket]:
    """A connection, and the other end of it as a plain socket that has passed the challenge."""
    ours, theirs = socket.socketpair()
    end = End(ours, loop, server=True, **how)
    answer_blocking(theirs, KEY, time.monotonic() + 10)
    return end, theirs


def fill(sock: socket.socket) -> None:
    """Make a socket full, so that its next write has to wait."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


# --- frames ------------------------------------------------------------------------


def test_frames_arrive_in_order_and_whole_in_both_directions(loop: IOLoop) -> None:
    server, client = make_pair(loop)
    sent = [(number, b"x" * (number * 997 % 70_000)) for number in range(300)]
    for message in sent:
        client.conn.send(message)
        server.conn.send(message)
    eventually(lambda: len(server.messages) == len(client.messages) == len(sent))
    assert server.messages == client.messages == sent
    client.conn.close()
    assert server.closed.wait(10)


def test_frames_sent_before_the_challenge_is_passed_wait_for_it(loop: IOLoop) -> None:
    ours, theirs = socket.socketpair()
    client = End(theirs, loop, server=False)
    client.conn.send((1, "early"))
    client.conn.post((2, "early"))
    client.conn.post((3, "early"))
    server = End(ours, loop, server=True)
    eventually(lambda: len(server.messages) == 3)
    assert [message[0] for message in server.messages] == [1, 2, 3]


def test_a_frame_that_comes_byte_by_byte_is_put_together(loop: IOLoop) -> None:
    server, sock = raw_client(loop)
    for byte in encode((7, "slow")) + encode((8, "next")):
        sock.send(bytes([byte]))
    eventually(lambda: len(server.messages) == 2)
    assert server.messages == [(7, "slow"), (8, "next")]
    sock.close()
    assert server.closed.wait(10)


def test_frames_behind_the_proof_in_the_same_packet_are_read(loop: IOLoop) -> None:
    from miniray.security.challenge import ClientChallenge

    ours, theirs = socket.socketpair()
    server = End(ours, loop, server=True)
    reply, _ = ClientChallenge(KEY).feed(theirs.recv(32))
    theirs.send(reply + encode((1, "at once")) + encode((2, "too"))[:-1])
    eventually(lambda: server.messages)
    theirs.send(encode((2, "too"))[-1:])
    eventually(lambda: len(server.messages) == 2)
    assert server.messages == [(1, "at once"), (2, "too")]
    theirs.close()


def test_messages_and_the_close_are_handled_in_the_loops_thread_and_once(loop: IOLoop) -> None:
    server, client = make_pair(loop)
    client.conn.send((1,))
    eventually(lambda: server.messages)
    for _ in range(3):
        server.conn.close()
    client.conn.close()
    assert server.closed.wait(10)
    assert client.closed.wait(10)
    assert server.closes == client.closes == 1
    assert server.threads == client.threads == {loop.thread}


def test_many_threads_send_without_mixing_their_frames(loop: IOLoop) -> None:
    server, client = make_pair(loop)

    def send(thread: int) -> None:
        for number in range(200):
            how = client.conn.post if number % 2 else client.conn.send
            how((thread, number, b"%d" % thread * (number * 37 % 5000)))

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: len(server.messages) == 800)
    for thread in range(4):
        numbers = [message[1] for message in server.messages if message[0] == thread]
        assert numbers == list(range(200))
    assert all(m[2] == b"%d" % m[0] * (m[1] * 37 % 5000) for m in server.messages)


def test_posted_frames_leave_without_anything_behind_them(loop: IOLoop) -> None:
    server, client = make_pair(loop)
    for number in range(50):
        client.conn.post((number,))
    eventually(lambda: len(server.messages) == 50)
    assert [message[0] for message in server.messages] == list(range(50))


def test_a_posted_frame_and_a_sent_one_keep_their_order(loop: IOLoop) -> None:
    server, client = make_pair(loop)
    for number in range(0, 400, 4):
        client.conn.post((number,))
        client.conn.post((number + 1,))
        client.conn.send((number + 2,))
        client.conn.send_with_fds((number + 3,), [])
    eventually(lambda: len(server.messages) == 400)
    assert [message[0] for message in server.messages] == list(range(400))


def test_send_does_not_block_on_a_peer_that_does_not_read(loop: IOLoop) -> None:
    server, sock = raw_client(loop)
    block = b"x" * 50_000
    for number in range(200):
        server.conn.send((number, block))
    assert server.conn.backlog() > 1_000_000
    received = bytearray()
    expected = b"".join(encode((number, block)) for number in range(200))
    while len(received) < len(expected):
        received += sock.recv(1 << 20)
    assert received == expected
    eventually(lambda: server.conn.backlog() == 0)
    sock.close()


# --- bad frames --------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xfe",
        b"",
        marshal.dumps((1, 2))[:-3],
        marshal.dumps(5),
        marshal.dumps(()),
        marshal.dumps({}),
        marshal.dumps(None),
        b"[" + struct.pack("<I", 1 << 31),
    ],
)
def test_a_frame_that_is_no_message_closes_its_connection_and_no_other(
    loop: IOLoop, body: bytes
) -> None:
    bad, sock = raw_client(loop)
    good, client = make_pair(loop)
    sock.send(encode((1, "before")) + struct.pack("<I", len(body)) + body + encode((2, "after")))
    assert bad.closed.wait(10)
    assert bad.messages == [(1, "before")]
    client.conn.send((3, "still here"))
    eventually(lambda: good.messages == [(3, "still here")])
    sock.close()


def test_a_frame_of_an_impossible_size_closes_the_connection(loop: IOLoop) -> None:
    server, sock = raw_client(loop)
    sock.send(struct.pack("<I", frames.MAX_FRAME + 1) + b"junk")
    assert server.closed.wait(10)
    sock.close()


def test_a_message_that_is_too_large_is_refused_at_its_sender(
    loop: IOLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 2000)
    server, client = make_pair(loop)
    for send in (client.conn.send, client.conn.post, encode):
        with pytest.raises(ValueError, match=r"takes 2 KiB; it may take 2 KiB\. Pass large"):
            send((1, bytes(2020)))
        client.conn.send((2, "after"))
    eventually(lambda: server.messages == [(2, "after")] * 3)
    assert not server.conn.closed


def test_what_waits_for_the_answer_of_a_refused_request_is_forgotten() -> None:
    def refuse(_message: object) -> bool:
        raise ValueError("too large")

    link = NodeLink.__new__(NodeLink)
    conn: Any = SimpleNamespace(send=refuse)
    link.__dict__.update(_numbers=iter(range(9)).__next__, _answers={}, _conn=conn)
    answers: list[Any] = []
    with pytest.raises(ValueError, match="too large"):
        link.node_request_async("any", (), lambda *answer: answers.append(answer))
    assert not link._answers
    assert not answers


def test_a_message_whose_handling_fails_does_not_stop_the_next_ones(loop: IOLoop) -> None:
    def handle(_conn: Connection, message: tuple[Any, ...]) -> None:
        if message[0] == 1:
            raise ZeroDivisionError

    server, sock = raw_client(loop, on_message=handle)
    data = encode((1,)) + encode((2,)) + encode((1,)) + encode((3,))
    for start in range(0, len(data), 3):
        sock.send(data[start : start + 3])
    eventually(lambda: len(server.messages) == 4)
    assert not server.conn.closed
    sock.close()


def test_nothing_is_handled_after_a_handler_has_closed(loop: IOLoop) -> None:
    server, sock = raw_client(loop, on_message=lambda conn, _message: conn.close())
    sock.send(encode((1,)) + encode((2,)) + encode((3,)))
    assert server.closed.wait(10)
    assert server.messages == [(1,)]
    sock.close()


def test_a_handler_can_send_and_close_from_within(loop: IOLoop) -> None:
    def answer(conn: Connection, message: tuple[Any, ...]) -> None:
        conn.send((message[0] + 1,))
        if message[0] == 5:
            conn.close()

    _server, client = make_pair(loop, on_message=answer)
    for number in range(10):
        client.conn.send((number,))
    assert client.closed.wait(10)
    assert client.messages == [(number + 1,) for number in range(6)]


# --- proving ------------------------------------------------------------------------


def test_a_peer_with_another_key_is_closed_unheard(loop: IOLoop) -> None:
    ours, theirs = socket.socketpair()
    server = End(ours, loop, server=True)
    client = End(theirs, loop, server=False, key=b"w" * 32)
    client.conn.send((1, "hear me"))
    assert server.closed.wait(10)
    assert client.closed.wait(10)
    assert server.messages == []


def test_a_client_leaves_a_server_with_another_key(loop: IOLoop) -> None:
    ours, theirs = socket.socketpair()
    client = End(theirs, loop, server=False)
    ours.send(b"n" * 32)
    answer = ours.recv(64)
    ours.send(answer[:32])  # its own proof, reflected
    assert client.closed.wait(10)
    assert client.messages == []
    ours.close()


def test_a_peer_that_never_proves_itself_is_closed_in_time(loop: IOLoop) -> None:
    ours, theirs = socket.socketpair()
    server = End(ours, loop, server=True, auth_timeout=0.05)
    theirs.send(b"x" * 10)  # less than a proof
    assert server.closed.wait(10)
    assert theirs.recv(64, socket.MSG_WAITALL) != b""  # the greeting
    theirs.close()


def test_a_slow_server_is_waited_for_however_long_it_takes(loop: IOLoop) -> None:
    ours, theirs = socket.socketpair()
    client = End(theirs, loop, server=False, auth_timeout=0.01)
    client.conn.send((1, "patient"))
    assert not client.closed.wait(0.1)
    server = End(ours, loop, server=True)
    eventually(lambda: server.messages == [(1, "patient")])


def test_a_slow_client_that_proves_itself_in_pieces_is_let_in(loop: IOLoop) -> None:
    from miniray.security.challenge import ClientChallenge

    ours, theirs = socket.socketpair()
    server = End(ours, loop, server=True, auth_timeout=5.0)
    reply, _ = ClientChallenge(KEY).feed(theirs.recv(32))
    for byte in reply:
        theirs.send(bytes([byte]))
    theirs.send(encode((1,)))
    eventually(lambda: server.messages == [(1,)])
    theirs.close()


def test_a_peer_that_is_gone_before_it_is_greeted_is_just_closed(loop: IOLoop) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    server = End(ours, loop, server=True)
    assert server.closed.wait(10)


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
    before, watched = open_files(), dict(loop._readers)
    pairs = [make_pair(loop) for _ in range(20)]
    for server, client in pairs:
        client.conn.send((1,))
        eventually(lambda server=server: server.messages)
        client.conn.close()
    for server, client in pairs:
        assert server.closed.wait(10)
        assert client.closed.wait(10)
    assert not open_files() - before
    assert loop._readers == watched
    assert not loop._writers


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
    monkeypatch.setattr(listener_module, "_ACCEPT_AGAIN", 0.05)
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
