"""Who asks how a process ended hears it, whenever that is known."""

from __future__ import annotations

from typing import Any

import pytest

from miniray.head.directories.clients import REMEMBERED, ProcessEnds, ProcessExit


class Clients:
    def __init__(self) -> None:
        self.on_ended: list[Any] = []
        self.answers: list[Any] = []

    def answer(self, process_id: bytes, request: int, result: Any) -> None:
        self.answers.append((process_id, request, result))

    def end(self, process_id: bytes, how: ProcessExit) -> None:
        for hook in self.on_ended:
            hook(process_id, how)


@pytest.fixture
def clients() -> Clients:
    return Clients()


class Timers:
    def __init__(self) -> None:
        self.later: list[Any] = []

    def call_later(self, _delay: float, callback: Any) -> None:
        self.later.append(callback)


@pytest.fixture
def timers() -> Timers:
    return Timers()


@pytest.fixture
def ends(clients: Clients, timers: Timers) -> ProcessEnds:
    return ProcessEnds(clients, timers)  # type: ignore[arg-type]


CRASH = ProcessExit(code=-9, pid=7, detail="Memory ran out.")


def test_it_is_told_when_it_is_known_already(clients: Clients, ends: ProcessEnds) -> None:
    clients.end(b"worker", CRASH)
    ends.wait((b"driver", 3), b"worker")
    assert clients.answers == [(b"driver", 3, (-9, 7, False, "Memory ran out."))]


def test_it_is_told_to_all_who_wait_when_it_happens(clients: Clients, ends: ProcessEnds) -> None:
    ends.wait((b"driver", 3), b"worker")
    ends.wait((b"other", 5), b"worker")
    clients.end(b"stranger", CRASH)
    assert not clients.answers
    clients.end(b"worker", ProcessExit(pid=7, with_node=True))
    assert clients.answers == [
        (b"driver", 3, (None, 7, True, "")),
        (b"other", 5, (None, 7, True, "")),
    ]


def test_it_is_told_after_a_while_that_nothing_is_known(
    clients: Clients, ends: ProcessEnds, timers: Timers
) -> None:
    ends.wait((b"driver", 3), b"worker")
    (give_up,) = timers.later
    give_up()
    clients.end(b"worker", CRASH)
    assert clients.answers == [(b"driver", 3, (None, 0, False, ""))]


def test_why_a_process_was_ended_is_told_with_its_end(clients: Clients, ends: ProcessEnds) -> None:
    ends.explain(b"worker", "Its group was removed.")
    for number, process in enumerate((b"worker", b"other")):
        clients.end(process, CRASH)
        ends.wait((b"driver", number), process)
    told = [answer[2][3] for answer in clients.answers]
    assert told == ["Its group was removed.", "Memory ran out."]


def test_ends_are_not_kept_for_ever(clients: Clients, ends: ProcessEnds) -> None:
    for number in range(REMEMBERED + 1):
        clients.end(b"%d" % number, CRASH)
    ends.wait((b"driver", 0), b"0")
    assert not clients.answers
