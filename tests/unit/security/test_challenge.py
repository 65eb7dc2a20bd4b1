from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from miniray.exceptions import AuthenticationError
from miniray.security.challenge import (
    ClientChallenge,
    ServerChallenge,
    answer_blocking,
    require_own_uid,
)

if TYPE_CHECKING:
    import socket

KEY = b"k" * 32


def in_seconds(seconds: float) -> float:
    return time.monotonic() + seconds


def serve(sock: socket.socket, key: bytes, after: bytes = b"") -> None:
    """The server's end with blocking reads, closing on a wrong answer."""
    challenge = ServerChallenge(key)
    sock.sendall(challenge.greeting)
    done = False
    while not done:
        data = sock.recv(7)
        if not data:
            return
        try:
            to_send, done = challenge.feed(data)
        except AuthenticationError:
            sock.close()
            return
        sock.sendall(to_send + (after if done else b""))


def test_two_ends_with_the_same_key_accept_each_other() -> None:
    server, client = ServerChallenge(KEY), ClientChallenge(KEY)
    answer, done = client.feed(server.greeting)
    assert not done
    verdict, done = server.feed(answer)
    assert done
    assert client.feed(verdict) == (b"", True)


def test_a_handshake_cut_into_single_bytes_works() -> None:
    server, client = ServerChallenge(KEY), ClientChallenge(KEY)
    answer = b"".join(client.feed(bytes([b]))[0] for b in server.greeting)
    verdict = b"".join(server.feed(bytes([b]))[0] for b in answer)
    assert [client.feed(bytes([b]))[1] for b in verdict] == [False] * 31 + [True]


def test_the_server_refuses_a_client_with_another_key() -> None:
    server, client = ServerChallenge(KEY), ClientChallenge(b"x" * 32)
    answer, _ = client.feed(server.greeting)
    with pytest.raises(AuthenticationError):
        server.feed(answer)


def test_the_client_refuses_a_server_with_another_key() -> None:
    client = ClientChallenge(KEY)
    client.feed(b"n" * 32)
    with pytest.raises(AuthenticationError):
        client.feed(b"v" * 32)


def test_an_answer_cannot_be_replayed_to_another_connection() -> None:
    first, second = ServerChallenge(KEY), ServerChallenge(KEY)
    answer, _ = ClientChallenge(KEY).feed(first.greeting)
    assert first.feed(answer)[1]
    with pytest.raises(AuthenticationError):
        second.feed(answer)


def test_a_clients_own_proof_cannot_be_reflected_as_the_servers_verdict() -> None:
    client = ClientChallenge(KEY)
    answer, _ = client.feed(b"n" * 32)
    with pytest.raises(AuthenticationError):
        client.feed(answer[:32])


def test_bytes_behind_the_handshake_are_handed_on() -> None:
    server, client = ServerChallenge(KEY), ClientChallenge(KEY)
    answer, _ = client.feed(server.greeting)
    verdict, _ = server.feed(answer + b"frame")
    assert server.surplus == b"frame"
    client.feed(verdict + b"reply")
    assert client.surplus == b"reply"


def test_bytes_before_the_proof_are_never_handed_on() -> None:
    server = ServerChallenge(KEY)
    server.feed(b"z" * 40)
    assert server.surplus == b""


def test_the_blocking_client_reads_nothing_beyond_the_handshake(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    thread = threading.Thread(target=serve, args=(theirs, KEY, b"first frame"))
    thread.start()
    answer_blocking(ours, KEY, in_seconds(5))
    assert ours.recv(100) == b"first frame"
    assert ours.gettimeout() is None
    thread.join()


def test_a_refused_blocking_client_gets_an_authentication_error(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    thread = threading.Thread(target=serve, args=(theirs, b"other" * 6))
    thread.start()
    with pytest.raises(AuthenticationError, match="different clusters"):
        answer_blocking(ours, KEY, in_seconds(5))
    thread.join()


def test_a_peer_that_closes_at_once_is_gone_rather_than_unauthentic(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    theirs.close()
    with pytest.raises(ConnectionResetError, match="at once"):
        answer_blocking(ours, KEY, in_seconds(5))


def test_a_silent_peer_ends_the_wait_at_the_deadline(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, _theirs = pair
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="in time"):
        answer_blocking(ours, KEY, in_seconds(0.1))
    assert time.monotonic() - started < 2


def test_a_peer_that_trickles_bytes_does_not_extend_the_deadline(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.05):
            theirs.send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        with pytest.raises(TimeoutError):
            answer_blocking(ours, KEY, in_seconds(0.3))
    finally:
        stop.set()
        thread.join()


def test_a_process_of_this_user_is_let_in(pair: tuple[socket.socket, socket.socket]) -> None:
    require_own_uid(pair[0])
