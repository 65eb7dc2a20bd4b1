"""`demand_blocking`: the server's end of the handshake in a thread that waits."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from miniray.exceptions import AuthenticationError
from miniray.security.challenge import NONCE_SIZE, answer_blocking, demand_blocking

KEY = b"k" * 32


def in_seconds(seconds: float) -> float:
    return time.monotonic() + seconds


def test_a_peer_with_the_key_is_let_in_and_what_it_says_next_is_not_lost(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair

    def be_client() -> None:
        answer_blocking(theirs, KEY, in_seconds(10))
        theirs.sendall(b"hello")

    client = threading.Thread(target=be_client)
    client.start()
    ours.settimeout(7.0)
    demand_blocking(ours, KEY, in_seconds(10))
    assert ours.recv(5) == b"hello"
    assert ours.gettimeout() == 7.0
    client.join()


def test_a_peer_with_another_key_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(bytes(64))
    with pytest.raises(AuthenticationError, match="without this cluster's key"):
        demand_blocking(ours, KEY, in_seconds(10))
    assert len(theirs.recv(1024)) == NONCE_SIZE  # the greeting, and no proof


def test_a_peer_that_says_nothing_is_given_up(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        demand_blocking(pair[0], KEY, in_seconds(0.05))


def test_a_peer_that_goes_away_is_told(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match="went away"):
        demand_blocking(ours, KEY, in_seconds(10))
