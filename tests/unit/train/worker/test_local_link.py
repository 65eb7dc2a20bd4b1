"""The connections between the processes of a local run, here within one."""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import socket
import threading

import pytest

from miniray.exceptions import AuthenticationError
from miniray.train import ControllerLostError
from miniray.train.worker import local_link
from miniray.train.worker.local_link import LinkClient, LinkServer

SECRET = b"secret of the run"


class Rank0:
    """The end of rank 0, with an event loop in a thread as the controller has it."""

    def __init__(self, size, answer):
        self.lost = queue.SimpleQueue()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="train-rank-0")
        self.thread.start()
        self.link = LinkServer(listener, SECRET, range(1, size), 30)
        self.loop.call_soon_threadsafe(self.link.serve, answer, self.lost.put)

    def do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def connect(self, rank):
        return LinkClient.connect(self.address, SECRET, rank, 30)

    def hang_up(self):
        self.do(self.link.end(0))

    def close(self):
        self.hang_up()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def start():
    """Starts the end of rank 0, which is closed after the test."""
    started = []

    def make(answer, size=2):
        started.append(Rank0(size, answer))
        return started[-1]

    yield make
    for rank_0 in started:
        rank_0.close()


async def echo(rank, kind, arguments):
    return rank, kind, arguments


async def never(rank, kind, arguments):
    await asyncio.Event().wait()


def test_requests_are_answered_and_begin_in_the_order_sent(start):
    asked = []

    async def answer(rank, kind, arguments):
        asked.append(arguments[0])
        return rank, kind, arguments

    client = start(answer).connect(1)
    futures = [client.ask("say", number) for number in range(100)]
    expected = [(1, "say", (number,)) for number in range(100)]
    assert [future.result(30) for future in futures] == expected
    assert asked == list(range(100))
    client.close()


def test_an_answer_that_takes_long_does_not_hold_up_the_others(start):
    slow = asyncio.Event()

    async def answer(rank, kind, arguments):
        if kind == "slow":
            await slow.wait()
        return kind

    rank_0 = start(answer)
    client = rank_0.connect(1)
    first = client.ask("slow")
    assert client.ask("quick").result(30) == "quick"
    assert not first.done()
    rank_0.loop.call_soon_threadsafe(slow.set)
    assert first.result(30) == "slow"
    client.close()


def test_an_error_is_raised_where_it_was_asked_for(start):
    async def answer(*_):
        raise ValueError("no")

    client = start(answer).connect(1)
    with pytest.raises(ValueError, match="no"):
        client.ask("anything").result(30)
    client.close()


def test_who_waits_for_rank_0_learns_that_it_is_gone(start):
    rank_0 = start(never)
    client = rank_0.connect(1)
    waiting = client.ask("something")
    rank_0.do(rank_0.link.wait_connected())
    rank_0.hang_up()
    with pytest.raises(ControllerLostError, match="Rank 0"):
        waiting.result(30)
    with pytest.raises(ControllerLostError, match="Rank 0"):
        client.ask("more").result(30)
    client.close()


def test_who_waits_for_an_answer_that_breaks_off_learns_that_rank_0_is_gone():
    here, there = socket.socketpair()
    client = LinkClient(here)
    waiting = client.ask("something")
    there.recv(10_000)  # a connection that is closed with unread data is reset
    there.sendall(local_link._framed((0, b"x" * 1000, None))[:500])
    there.close()
    with pytest.raises(ControllerLostError, match="Rank 0"):
        waiting.result(30)
    client.close()


def test_rank_0_learns_which_rank_is_gone(start):
    rank_0 = start(echo, size=4)
    clients = [rank_0.connect(rank) for rank in range(1, 4)]
    rank_0.do(rank_0.link.wait_connected())
    clients[1].close()
    assert rank_0.lost.get(timeout=30) == 2
    for client in (clients[0], clients[2]):
        assert client.ask("still").result(30)
        client.close()


class Evil:
    """Does harm when it is unpickled."""

    def __reduce__(self):
        return os._exit, (1,)


def test_nothing_is_unpickled_from_who_does_not_know_the_secret(start):
    rank_0 = start(echo)
    with socket.create_connection(rank_0.address) as stranger:
        data = pickle.dumps(Evil())
        stranger.sendall(bytes(64) + len(data).to_bytes(8, "big") + data)
        stranger.recv(32)
        assert stranger.recv(1) == b""
    with pytest.raises(AuthenticationError):
        LinkClient.connect(rank_0.address, b"guess", 1, 30)
    client = rank_0.connect(1)
    assert client.ask("hello").result(30) == (1, "hello", ())
    client.close()


def test_a_stranger_who_says_nothing_is_given_up_and_holds_up_nobody(start, monkeypatch):
    monkeypatch.setattr(local_link, "PROOF_TIMEOUT", 0.5)
    rank_0 = start(echo)
    with socket.create_connection(rank_0.address) as silent:
        client = rank_0.connect(1)
        silent.settimeout(30)
        silent.recv(32)
        assert silent.recv(1) == b""
    client.close()


def test_ranks_that_do_not_come_are_named():
    async def scenario():
        link = LinkServer(socket.create_server(("127.0.0.1", 0)), SECRET, [1, 2], 0.01)
        link.serve(echo, print)
        try:
            await link.wait_connected()
        finally:
            await link.end(0)

    with pytest.raises(TimeoutError, match=r"Ranks \[1, 2\] did not connect"):
        asyncio.run(scenario())


def test_a_closed_link_leaves_no_thread(start):
    client = start(echo).connect(1)
    client.close()
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith("train-link")}
