"""The connections between the processes of a local run, here within one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import os
import pickle
import queue
import signal
import socket
import threading

import pytest

from miniray.exceptions import AuthenticationError
from miniray.train import ControllerLostError
from miniray.train.worker import local_link
from miniray.train.worker.local_link import LinkClient, LinkServer

SECRET = b"secret of the run"


class Rank0:
    """The end of rank 0."""

    def __init__(self, answer):
        self.lost = queue.SimpleQueue()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.link = LinkServer(listener, SECRET, 30)
        self.link.serve(answer, self.lost.put)

    def connect(self, rank):
        return LinkClient(self.address, SECRET, rank, 30)


@pytest.fixture
def start():
    """Starts the end of rank 0, which is closed after the test."""
    started = []

    def make(answer):
        started.append(Rank0(answer))
        return started[-1]

    yield make
    for rank_0 in started:
        rank_0.link.close()


def echo(rank, kind, *arguments):
    answer = concurrent.futures.Future()
    answer.set_result((rank, kind, arguments))
    return answer


def never(*_):
    return concurrent.futures.Future()


def in_thread(function, *arguments):
    """Call a function in a thread of its own, which may outlive the test."""
    found = concurrent.futures.Future()

    def call():
        try:
            found.set_result(function(*arguments))
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return found


def test_requests_are_answered(start):
    client = start(echo).connect(1)
    for number in range(100):
        assert client.ask("say", number).result() == (1, "say", (number,))
    client.close()


def test_an_answer_that_takes_long_does_not_hold_up_other_threads(start):
    slow = concurrent.futures.Future()
    client = start(lambda _, kind: slow if kind == "slow" else echo(1, kind)).connect(1)
    waiting = in_thread(client.ask, "slow")
    assert client.ask("quick").result() == (1, "quick", ())
    assert not waiting.done()
    slow.set_result("at last")
    assert waiting.result(30).result() == "at last"
    client.close()


def test_an_error_is_raised_where_it_was_asked_for(start):
    def answer(*_):
        failed = concurrent.futures.Future()
        failed.set_exception(ValueError("no"))
        return failed

    client = start(answer).connect(1)
    with pytest.raises(ValueError, match="no"):
        client.ask("anything").result()
    client.close()


def test_who_waits_for_rank_0_learns_that_it_is_gone(start):
    asked = threading.Event()

    def answer(*_):
        asked.set()
        return never()

    rank_0 = start(answer)
    client = rank_0.connect(1)
    waiting = in_thread(client.ask, "something")
    assert asked.wait(30)
    rank_0.link.close()
    with pytest.raises(ControllerLostError, match="Rank 0"):
        waiting.result(30)
    with pytest.raises(ControllerLostError, match="Rank 0"):
        client.ask("more")
    client.close()


def test_an_answer_that_ctrl_c_kept_from_being_read_is_not_taken_for_the_next(start):
    def answer(rank, kind):
        if kind != "first":
            return echo(rank, kind)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return never()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    client = start(answer).connect(1)
    try:
        with pytest.raises(KeyboardInterrupt):
            client.ask("first")
    finally:
        signal.signal(signal.SIGINT, before)
    assert client.ask("second").result() == (1, "second", ())
    client.close()


def test_a_signal_handler_may_ask_while_its_thread_waits_for_an_answer(start):
    first, told = concurrent.futures.Future(), []

    def answer(rank, kind):
        if kind != "first":
            return echo(rank, kind)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        return first

    def handle(*_):
        told.append(client.ask("second").result())
        first.set_result("of the first")

    before = signal.signal(signal.SIGUSR1, handle)
    client = start(answer).connect(1)
    try:
        assert client.ask("first").result() == "of the first"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told == [(1, "second", ())]
    client.close()


def test_rank_0_learns_which_rank_is_gone(start):
    rank_0 = start(echo)
    clients = [rank_0.connect(rank) for rank in range(1, 4)]
    assert all(client.ask("here").result() for client in clients)
    clients[1].close()
    assert rank_0.lost.get(timeout=30) == 2
    for client in (clients[0], clients[2]):
        assert client.ask("still").result()
        client.close()


def test_threads_of_connections_that_are_over_are_forgotten(start):
    client = start(echo).connect(1)
    for number in range(50):
        asked = in_thread(lambda number: client.ask("say", number).result(), number)
        assert asked.result(30) == (1, "say", (number,))
    gc.collect()
    threads = [each for each in gc.get_objects() if type(each) is threading.Thread]
    assert len([each for each in threads if each.name == "train-link"]) < 25
    client.close()


class Evil:
    """Does harm when it is unpickled."""

    def __reduce__(self):
        return os._exit, (1,)


def test_nothing_is_unpickled_from_who_does_not_know_the_secret(start):
    rank_0 = start(echo)
    with socket.create_connection(rank_0.address) as stranger:
        data = pickle.dumps(Evil())
        stranger.sendall(bytes(64) + len(data).to_bytes(4, "big") + data)
        stranger.settimeout(30)
        stranger.recv(32)
        with contextlib.suppress(ConnectionResetError):  # by what it has sent and nobody has read
            assert stranger.recv(1) == b""
    with pytest.raises(AuthenticationError):
        LinkClient(rank_0.address, b"guess", 1, 30)
    client = rank_0.connect(1)
    assert client.ask("hello").result() == (1, "hello", ())
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


def test_a_closed_link_leaves_no_thread(start):
    rank_0 = start(echo)
    client = rank_0.connect(1)
    assert client.ask("here").result()
    with socket.create_connection(rank_0.address) as silent:
        assert silent.recv(32)
        rank_0.link.close()
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith("train-link")}
    client.close()
