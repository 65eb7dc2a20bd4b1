"""The connections between the processes of a local run, here within one."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import pickle
import queue
import socket
import threading
from multiprocessing.connection import Client

import pytest

from miniray.train import ControllerLostError
from miniray.train.worker.local_link import LinkClient, LinkServer

SECRET = b"secret of the run"


def connect(size, before=lambda address: None):
    """Rank 0's end, and those of the others."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        server = pool.submit(LinkServer.accept, listener, SECRET, range(1, size), 30)
        before(address)
        ranks = range(1, size)
        clients = [pool.submit(LinkClient.connect, address, SECRET, rank, 30) for rank in ranks]
        return server.result(), [client.result() for client in clients]


@pytest.fixture
def link():
    """Rank 0's end, that of rank 1, and which ranks were lost."""
    server, (client,) = connect(2)
    yield server, client
    client.close()
    server.close()


def answered(value):
    future = concurrent.futures.Future()
    future.set_result(value)
    return future


def ignore(rank):
    pass


def test_requests_are_answered_and_begin_in_the_order_sent(link):
    server, client = link
    asked = []

    def answer(rank, kind, arguments):
        asked.append(arguments[0])
        return answered((rank, kind, arguments))

    server.serve(answer, ignore)
    futures = [client.ask("say", number) for number in range(100)]
    expected = [(1, "say", (number,)) for number in range(100)]
    assert [future.result(30) for future in futures] == expected
    assert asked == list(range(100))


def test_an_answer_that_takes_long_does_not_hold_up_the_others(link):
    server, client = link
    slow = concurrent.futures.Future()
    server.serve(lambda rank, kind, arguments: slow if kind == "slow" else answered(kind), ignore)
    first = client.ask("slow")
    assert client.ask("quick").result(30) == "quick"
    assert not first.done()
    slow.set_result("at last")
    assert first.result(30) == "at last"


def test_an_error_is_raised_where_it_was_asked_for(link):
    server, client = link
    failed = concurrent.futures.Future()
    failed.set_exception(ValueError("no"))
    server.serve(lambda *_: failed, ignore)
    with pytest.raises(ValueError, match="no"):
        client.ask("anything").result(30)


def test_who_waits_for_rank_0_learns_that_it_is_gone(link):
    server, client = link
    server.serve(lambda *_: concurrent.futures.Future(), ignore)
    waiting = client.ask("something")
    server.close()
    with pytest.raises(ControllerLostError, match="Rank 0"):
        waiting.result(30)
    with pytest.raises(ControllerLostError, match="Rank 0"):
        client.ask("more").result(30)


def test_rank_0_learns_which_rank_is_gone():
    server, clients = connect(4)
    lost = queue.SimpleQueue()
    server.serve(lambda *_: answered(None), lost.put)
    clients[1].close()
    assert lost.get(timeout=30) == 2
    for client in (clients[0], clients[2]):
        assert client.ask("still").result(30) is None
    server.close()
    for client in clients:
        client.close()


class Evil:
    """Does harm when it is unpickled."""

    def __reduce__(self):
        return os._exit, (1,)


def test_nothing_is_unpickled_from_who_does_not_know_the_secret():
    def intrude(address):
        with socket.create_connection(address) as stranger:
            stranger.sendall(len(data := pickle.dumps(Evil())).to_bytes(4, "big") + data)
        with pytest.raises(multiprocessing.AuthenticationError):
            Client(address, authkey=b"guess")

    server, (client,) = connect(2, before=intrude)
    server.serve(lambda *_: answered("here"), ignore)
    assert client.ask("hello").result(30) == "here"
    client.close()
    server.close()


def test_a_stranger_who_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr("miniray.train.worker.local_link.PROOF_TIMEOUT", 0.5)
    silent = []
    server, (client,) = connect(2, lambda address: silent.append(socket.create_connection(address)))
    client.close()
    server.close()
    silent[0].close()


def test_ranks_that_do_not_come_are_named():
    with pytest.raises(TimeoutError, match=r"Ranks \[1, 2\] did not connect"):
        LinkServer.accept(socket.create_server(("127.0.0.1", 0)), SECRET, [1, 2], 0.01)


def test_a_closed_link_leaves_no_thread(link):
    server, client = link
    server.serve(lambda *_: answered(None), ignore)
    client.close()
    server.close()
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith(("train-link", "train-rank"))}
