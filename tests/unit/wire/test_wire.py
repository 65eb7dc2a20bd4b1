"""Frames over a connection, good and bad, and proving who is at its end."""

from __future__ import annotations

import marshal
import socket
import struct
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from kept import kept
from process_doubles import eventually
from wire_ends import KEY, End, make_pair, raw_client

from miniray.wire import sockets
from miniray.wire.node_link import NodeLink
from miniray.wire.sockets import encode

if TYPE_CHECKING:
    from miniray.wire.connection import Connection
    from miniray.wire.io_loop import IOLoop


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
    assert server.threads == client.threads == {loop._thread}


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
    sock.send(struct.pack("<I", sockets.MAX_FRAME + 1) + b"junk")
    assert server.closed.wait(10)
    sock.close()


def test_a_message_that_is_too_large_is_refused_at_its_sender(
    loop: IOLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MAX_FRAME", 2000)
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
    before = kept(link)
    with pytest.raises(ValueError, match="too large"):
        link.node_request_async("any", (), lambda *answer: answers.append(answer))
    assert kept(link) == before
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
